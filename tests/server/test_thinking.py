"""Reasoning: its separation from the answer, and its end before a call or JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.thinking import ThoughtFormat, ThoughtParser, thought_format_of
from tests.support.cover import some
from tests.support.running import serving
from tests.support.scripted import TEMPLATE, scripted

CHAT: Any = [{"role": "user", "content": "go"}]
THINK = ThoughtFormat("<think>", "</think>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OFF = {"speculation": "off"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'

SPLIT = [
    ("<think>\nhm\n</think>\n\nyes\n", False, "hm", "yes\n"),
    ("\n<think>a <b </thin k></think>yes", False, "a <b </thin k>", "yes"),
    ("<think>\n\n</think>\n\nyes", False, "", "yes"),
    ("hm\n\n so\n</think> yes </think>", True, "hm\n\n so", "yes </think>"),
    ("  yes <think>no</think>", False, "", "  yes <think>no</think>"),
    ("<thin", False, "", "<thin"),
    ("<think>cut </th", False, "cut </th", ""),
    (" ", False, "", " "),
    ("", True, "", ""),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "inside", "thought", "answer"), SPLIT)
def test_reasoning_is_split_however_it_arrives(text: str, inside: bool, thought: str, answer: str, step: int) -> None:
    parser = ThoughtParser(THINK, inside)
    parts = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
    parts.append(parser.flush())
    assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == (thought, answer)


def test_reasoning_is_shown_as_it_is_written() -> None:
    parser = ThoughtParser(THINK, inside=False)
    pieces = [parser.push(piece) for piece in ("<think>", "one ", "two <", "/think>", "\n", "yes")]
    assert pieces == [("", ""), ("one", ""), (" two", ""), ("", ""), ("", ""), ("", "yes")]


GEMMA = "{# <|channel>thought <channel|> #}"


@pytest.mark.parametrize("special", [(), ("<|channel>", "<channel|>")])
def test_gemma_thinks_in_a_channel(special: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance")
    for answer, asked in (("It is so.", {}), ('{"a": 7}', {"guided_json": SCHEMA})):
        with serving(scripted(f"<|channel>thought\nI add.\n<channel|>{answer}", GEMMA + "go:", special)) as it:
            made = it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 300, **asked}).json()
            message = made["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("I add.", answer)
    with serving(scripted("yes", GEMMA + "go:", special)) as it:
        body = {"messages": CHAT, "reasoning": "off", "max_tokens": 1}
        used = it.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
        assert (
            used
            == it.post("/tokenize", {"messages": CHAT}).json()["count"]
            + (it.post("/tokenize", {"prompt": "<|channel>thought\n<channel|>"}).json()["count"])
        )


def test_families() -> None:
    assert thought_format_of("{{ '[THINK]' }}{{ '[/THINK]' }}") == ThoughtFormat("[THINK]", "[/THINK]")
    assert thought_format_of(None) is thought_format_of("<think>") is None


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("begun", ["", "<think>\n"])
def test_chats_have_the_reasoning_apart(special: tuple[str, ...], begun: str) -> None:
    text = "<think>\nI add <tool_call>.\n</think>\n\nIt is so."
    with serving(scripted(text.removeprefix(begun), TEMPLATE + begun, special)) as it:
        made = it.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=200)
        message = made.choices[0].message.model_dump()
        assert (message["reasoning_content"], message["content"]) == ("I add <tool_call>.", "It is so.")
        assert made.usage is not None
        assert made.usage.completion_tokens_details is not None
        assert 0 < (made.usage.completion_tokens_details.reasoning_tokens or 0) < made.usage.completion_tokens
        deltas = [
            event.choices[0].delta.model_dump()
            for event in it.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=200, stream=True)
        ]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I add <tool_call>."
        assert "".join(delta["content"] or "" for delta in deltas) == "It is so."
        whole = it.post("/v1/chat/completions", {"messages": CHAT, "reasoning_format": "none"}).json()
        raw = whole["choices"][0]["message"]
        assert "reasoning_content" not in raw
        if not special:  # a text leaves special tokens out
            assert raw["content"] == text.removeprefix(begun)


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "form": ('{"a": 7}', {"response_format": FORM}),
    "schema": ('{"a": 7}', {"guided_json": SCHEMA}),
    "regex": ("7/8", {"guided_regex": "[0-9]/[0-9]"}),
    "grammar": ("yes yes", {"guided_grammar": 'start: word " " word\nword: "yes"'}),
    "required": (CALL, {"tools": [TOOL], "tool_choice": "required"}),
    "tools, form": (CALL, {"tools": [TOOL], "response_format": FORM}),
    "tools": (CALL, {"tools": [TOOL]}),
}


def after_reasoning(name: str, begun: str = "", special: tuple[str, ...] = ()) -> None:
    """After the end of its reasoning, the reply follows the constraint."""
    pytest.importorskip("llguidance")
    thought, (answer, asked) = '<think>\nNot {"b": 1} yet.\n</think>\n\n'.removeprefix(begun), ASKED[name]
    with serving(scripted(thought + answer, TEMPLATE + begun, special)) as it:
        body = {"messages": CHAT, "max_tokens": 300, **asked}
        choices = [it.post("/v1/chat/completions", {**body, **how}).json()["choices"][0] for how in ({}, OFF)]
    message = choices[0]["message"]
    assert message["reasoning_content"] == 'Not {"b": 1} yet.'
    if answer is CALL:
        assert choices[0]["finish_reason"] == "tool_calls"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 7}
        assert message["content"] is None
    else:
        assert message["content"] == answer
        assert choices[0] == choices[1]


@pytest.mark.parametrize("name", ASKED)
def test_json_and_calls_begin_after_the_reasoning(name: str) -> None:
    after_reasoning(name)


@some("name", list(ASKED), fast=["form", "required"])
@pytest.mark.parametrize(("begun", "special"), [("<think>\n", ()), ("", ("<think>", "</think>"))])
def test_they_do_so_too_where_the_prompt_or_a_special_token_opens_it(
    name: str, begun: str, special: tuple[str, ...]
) -> None:
    after_reasoning(name, begun, special)


def test_a_reply_without_reasoning_may_follow_a_schema() -> None:
    pytest.importorskip("llguidance")
    with serving(scripted('{"a": 7}')) as it:
        made = it.post("/v1/chat/completions", {"messages": CHAT, "guided_json": SCHEMA}).json()
        assert made["choices"][0]["message"] == {"role": "assistant", "content": '{"a": 7}', "refusal": None}


def prompt_of(it: Any, **asked: Any) -> int:
    made = it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **asked}).json()
    return int(made["usage"]["prompt_tokens"])


def test_reasoning_can_be_switched_off() -> None:
    with serving(scripted("yes", "{# </think> #}{% for i in range(20) %}a{% endfor %}")) as it:
        tokens = {
            name: it.post("/tokenize", {"prompt": text}).json()["count"]
            for name, text in (("all", "a" * 20 + "<think>\n\n</think>\n\n"), ("none", "a" * 20))
        }
        assert prompt_of(it, reasoning="off") == prompt_of(it, reasoning_effort="none") == tokens["all"]
        assert prompt_of(it, reasoning="auto") == prompt_of(it) == tokens["none"]
    with serving(scripted("yes", "{# </think> #}ab<think>\n")) as it:
        wanted = it.post("/tokenize", {"prompt": "ab<think>\n\n</think>\n\n"}).json()["count"]
        assert prompt_of(it, reasoning="off") == wanted


def test_effort_reaches_the_template() -> None:
    template = "{% if enable_thinking %}{{ reasoning_effort }}{% else %}-{% endif %}"
    with serving(scripted("yes", template)) as it:
        counts = {
            text: it.post("/tokenize", {"prompt": text}).json()["count"] for text in ("low", "medium", "high", "-")
        }
        for effort, shown in (
            ("minimal", "low"),
            ("low", "low"),
            ("medium", "medium"),
            ("xhigh", "high"),
            ("max", "high"),
        ):
            assert prompt_of(it, reasoning_effort=effort) == counts[shown]
        assert prompt_of(it) == prompt_of(it, reasoning="off") == counts["-"]
        body = {"messages": CHAT, "reasoning": "off", "reasoning_effort": "high"}
        assert it.post("/v1/chat/completions", body).json()["error"]["param"] == "reasoning"


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_stop_strings_end_the_answer_and_not_the_reasoning(special: tuple[str, ...]) -> None:
    with serving(scripted("<think>One.\n\nTwo.</think>It is 4.\n\nNo more", special=special)) as it:
        for how in ({}, OFF):
            body = {"messages": CHAT, "stop": ["\n\n"], "max_tokens": 200, **how}
            made = it.post("/v1/chat/completions", body).json()
            assert made["choices"][0]["message"]["reasoning_content"] == "One.\n\nTwo."
            assert made["choices"][0]["message"]["content"] == "It is 4."
            assert made["choices"][0]["finish_reason"] == "stop"
        body = {"model": "toy", "max_tokens": 200, "messages": CHAT, "stop_sequences": ["\n\n"]}
        made = it.post("/v1/messages", body).json()
        assert [block["type"] for block in made["content"]] == ["thinking", "text"]
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "\n\n")
        options = {"stop": ["\n\n"], "num_predict": 200}
        made = it.post("/api/chat", {"model": "toy", "messages": CHAT, "stream": False, "options": options}).json()
        assert (made["message"]["thinking"], made["message"]["content"]) == ("One.\n\nTwo.", "It is 4.")


@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
def test_a_call_in_reasoning_that_never_ends_is_a_call_in_every_api(special: tuple[str, ...]) -> None:
    function = {"name": "add", "parameters": SCHEMA}
    with serving(scripted(f"<think>I add.\n{CALL}", special=special)) as it:
        chat = it.post("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "max_tokens": 200}).json()
        message = chat["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("I add.", None)
        assert chat["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 7}
        answer = it.post("/v1/responses", {"input": "go", "tools": [{"type": "function", **function}]}).json()
        assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
        tools = [{"name": "add", "input_schema": SCHEMA}]
        made = it.post("/v1/messages", {"model": "toy", "max_tokens": 200, "messages": CHAT, "tools": tools}).json()
        assert (made["content"][-1]["input"], made["stop_reason"]) == ({"a": 7}, "tool_use")
        body = {"model": "toy", "messages": CHAT, "tools": [TOOL], "stream": False}
        called = it.post("/api/chat", body).json()["message"]
        assert called["tool_calls"][0]["function"]["arguments"] == {"a": 7}
        events = it.openai.chat.completions.create(
            model="toy",
            messages=CHAT,
            tools=[TOOL],
            max_tokens=200,
            stream=True,  # type: ignore[list-item]
        )
        deltas = [event.choices[0].delta.model_dump() for event in events]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I add."
        assert sum(len(delta["tool_calls"] or ()) for delta in deltas) == 1
    with serving(scripted(f"<think>I could write {CALL}.</think>No.", special=special)) as it:
        message = it.post("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "max_tokens": 200}).json()
        assert "tool_calls" not in message["choices"][0]["message"]
        assert message["choices"][0]["message"]["content"] == "No."
