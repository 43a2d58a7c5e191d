"""Histories that must not end a conversation: malformed calls, old images, calls that a template does not show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.chat.tools import KIMI, LFM, PHI, adapt_to_template
from paceline.checkpoints.loader import open_model
from paceline.llm import LLM
from tests.support.cover import some
from tests.support.running import Serving, serving
from tests.support.scripted import scripted
from tests.support.vocabularies import speaker

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "hi"}
ARGUMENTS = ['{"city": "Par', "", "null", "[]", '"ls"', "ls -l\n", None, [], {"city": "Rome"}, 5]
PNG = "iVBORw0KGgo="


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    """A random model with the demo's tokenizer and chat template."""
    with serving(LLM(speaker(open_model("demo").tokenizer))) as it:
        yield it


def prompt(it: Serving, messages: Any, **more: Any) -> str:
    answer = it.post("/apply-template", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt"])


@some("given", {repr(given): given for given in ARGUMENTS}, fast=[repr('{"city": "Par'), "5"])
def test_a_malformed_call_in_the_past_is_shown_in_every_api(served: Serving, given: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": given}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "c1", "content": None})
    item = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": given}
    result = {"type": "function_call_output", "call_id": "c1", "output": "bad"}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": given}
    back = {"type": "tool_result", "tool_use_id": "c1", "content": "bad"}
    past = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": given}}]}
    function_tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": chat, "tools": TOOLS, "max_tokens": 2}),
        (
            "/v1/responses",
            {"input": [USER, item, result, USER], "tools": [function_tool], "max_output_tokens": 16},
        ),
        (
            "/v1/messages",
            {
                "model": "toy",
                "max_tokens": 2,
                "messages": [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [back]}],
                "tools": [{"name": "look", "input_schema": SCHEMA}],
            },
        ),
        (
            "/api/chat",
            {
                "model": "toy",
                "stream": False,
                "options": {"num_predict": 2},
                "messages": [USER, past, {"role": "tool", "content": "bad"}],
                "tools": TOOLS,
            },
        ),
    ]
    for path, body in bodies:
        answer = served.post(path, body)
        assert answer.status_code == 200, (path, answer.text)
    if isinstance(given, str) and "ls" in given:
        assert "ls" in prompt(served, chat, tools=TOOLS)


def test_calls_of_other_servers_are_accepted(served: Serving) -> None:
    odd = [
        {"id": "1", "type": None, "function": {"name": "no such: name", "arguments": "{}"}},
        {"id": "2", "function": {"name": "look"}},
        {"id": "3", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
    ]
    text = prompt(
        served, [USER, {"role": "assistant", "tool_calls": odd}, {"role": "tool", "content": None}], tools=TOOLS
    )
    assert "no such: name" in text
    assert "*** Begin" in text
    assert prompt(served, [USER, {"role": "assistant", "content": None}, USER])
    refused = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]})
    assert refused.status_code == 400


def test_an_old_image_is_a_note_and_a_new_one_an_error(served: Serving) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    sound = {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image, sound]}
    later = [asked, {"role": "assistant", "content": "A dot."}, {"role": "user", "content": "thanks"}]
    text = prompt(served, later)
    assert "what is it?\n[image_url left out" in text
    assert "[input_audio left out" in text
    assert served.post("/v1/chat/completions", {"messages": later, "max_tokens": 2}).status_code == 200
    for path in ("/v1/chat/completions", "/apply-template", "/tokenize"):
        for i, part in ((1, image), (1, sound)):
            refused = served.post(path, {"messages": [{"role": "user", "content": [asked["content"][0], part]}]})  # type: ignore[index]
            assert refused.status_code == 400
            assert f"messages.0.content.{i}: type must be 'text', got '{part['type']}'" in refused.text
    shot = [USER, {"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": [image]}]
    assert "[image_url left out" in prompt(served, shot)


def test_an_old_image_is_a_note_in_ollamas_api_too(served: Serving) -> None:
    asked = {"role": "user", "content": "what is it?", "images": [PNG]}
    later = [asked, {"role": "assistant", "content": "A dot."}, {"role": "user", "content": "thanks", "images": []}]
    body: Any = {"model": "toy", "stream": False, "options": {"num_predict": 2}}
    plain = served.post("/api/chat", {**body, "messages": [{**asked, "images": None}, *later[1:]]}).json()
    noted = served.post("/api/chat", {**body, "messages": later}).json()
    assert noted["prompt_eval_count"] > plain["prompt_eval_count"]
    refused = served.post("/api/chat", {**body, "messages": [asked]})
    assert refused.status_code == 400
    assert "messages.0.images: not supported by this server" in refused.text


def test_calls_that_a_template_does_not_show_become_text() -> None:
    call = {"id": "x", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    chat = [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}, {"role": "tool", "content": "sun"}]
    told, tools = adapt_to_template("{{ tools }}{{ messages }}", LFM, chat, TOOLS)
    assert tools == TOOLS
    assert told[1]["content"] == (
        'I look.\n<|tool_call_start|>[{"name": "look", "arguments": {"city": "Rome"}}]<|tool_call_end|>'
    )
    assert adapt_to_template("{{ tools }}{{ m.tool_calls }}", LFM, chat, TOOLS) == (chat, TOOLS)
    counted, _ = adapt_to_template("{{ tools }}{{ m.tool_calls }}", KIMI, chat, TOOLS)
    assert counted[1]["tool_calls"][0]["id"] == "functions.look:0"


def test_tools_go_into_the_system_message_where_the_template_looks_for_them() -> None:
    template = "{% if 'tools' in message and message['tools'] is not none %}<|tool|>{{ message['tools'] }}<|/tool|>"
    told, tools = adapt_to_template(template, PHI, [USER], TOOLS)
    assert not tools
    assert json.loads(told[0]["tools"]) == [TOOLS[0]["function"]]
    assert (told[0]["role"], told[1]) == ("system", USER)
    told, _ = adapt_to_template(template, PHI, [{"role": "system", "content": "Be."}, USER], TOOLS)
    assert (len(told), told[0]["content"]) == (2, "Be.")


def test_a_template_for_tools_is_used_when_tools_are_given() -> None:
    llm = scripted("<|START_ACTION|>[{'tool_name': 'look', 'parameters': {}}]<|END_ACTION|>", "{{ 'default:' }}")
    llm.tokenizer.named_templates["tool_use"] = "{# tools <|START_ACTION|> #}tools go:"
    with serving(llm) as it:
        assert prompt(it, [USER]) == "default:"
        assert prompt(it, [USER], tools=TOOLS) == "tools go:"
    llm = scripted("x" + "<|START_ACTION|>[{'tool_name': 'look', 'parameters': {}}]<|END_ACTION|>", "abc")
    llm.tokenizer.named_templates["tool_use"] = "{# tools <|START_ACTION|> #}abc"
    with serving(llm) as it:
        body = {"messages": [USER], "tools": TOOLS, "max_tokens": 200}
        message = it.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("x", "look")


HUGE = 10**40


def test_a_call_with_a_huge_number_can_be_sent_back_in_every_api(served: Serving) -> None:
    given = {"city": HUGE, "deep": [{"n": -HUGE}]}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps(given)}}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": given}
    ollama = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": given}}]}
    back = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]}
    user = {"role": "user", "content": "x"}
    for path, messages in (
        ("/v1/chat/completions", [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, user]),
        ("/v1/messages", [USER, {"role": "assistant", "content": [use]}, back]),
        ("/api/chat", [USER, ollama, user]),
    ):
        answer = served.post(path, {"model": "toy", "messages": messages, "max_tokens": 1, "stream": False})
        assert answer.status_code == 200, answer.text
    assert str(HUGE) in prompt(served, [USER, {"role": "assistant", "tool_calls": [call]}, user], tools=TOOLS)


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": HUGE},
        {"logit_bias": {"1": HUGE}},
        {"arguments": {"n": HUGE}},
        {"input": {"n": HUGE}},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {"input": {"maximum": HUGE}}}},
                }
            ]
        },
        {"metadata": {"name": "x", "arguments": {"n": 1e400}}},
    ],
    ids=str,
)
def test_numbers_beyond_64_bits_are_refused_elsewhere(served: Serving, body: dict[str, Any]) -> None:
    data = json.dumps({"messages": [USER], **body}).replace("Infinity", "1e400")
    answer = served.post("/v1/chat/completions", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "64 bits" in answer.json()["error"]["message"]
