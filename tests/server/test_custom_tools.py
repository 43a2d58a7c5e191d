"""Custom tools with free text, such as Codex's apply_patch, and other requests of Codex."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.sampling.lark_pattern import pattern_of
from paceline.server.apis.openai_chat import CustomTool
from paceline.server.apis.responses_request import pack_summary, unpack_summary
from tests.support.running import Serving, serving
from tests.support.scripted import scripted
from tests.support.toys import toy_llm

GRAMMAR = """start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?

hunk: add | remove
# In the form of Codex's own grammar.
add: "+" name LF line+
remove: "-" name LF
name: /(.+)/
line: ">" /(.*)/ LF -> line

%import common.LF
"""
PATCH = '*** Begin\n+a.py\n>say("hi")\n>\n*** End\n'
TOOL = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
CHAT_TOOL = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR}},
    },
}
FUNCTION = {"type": "function", "name": "ping", "parameters": {"type": "object", "properties": {}}}
SHORT = {"type": "custom", "name": "say", "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}\\n"}}
CALL = f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': PATCH}})}\n</tool_call>"
GO = [{"role": "user", "content": "go"}]


def events(it: Serving, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = it.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("grammar", "fits", "not_fits"),
    [
        (GRAMMAR, [PATCH, "*** Begin\n-x\n*** End"], ["*** Begin\n*** End", "*** Begin\n+a\n*** End", "x" + PATCH]),
        ("start: /.+/", ["a", "a b"], ["", "a\nb"]),
        ('start: "a" ("b" | "c")* ["d"]', ["a", "abcbd", "ad"], ["b", "add"]),
        ('start: x~2..3\nx: "1"\n | "2"', ["12", "111"], ["1", "1111", "13"]),
        ('start: WS_INLINE "a//b" // says nothing\n%import common.WS_INLINE', [" a//b"], ["a//b"]),
        (r'?start: /[a-z]+\/[0-9]{2}/ "\n"', ["ab/12\n"], ["ab/1\n", "ab/12"]),
    ],
)
def test_a_regular_grammar_is_a_pattern(grammar: str, fits: list[str], not_fits: list[str]) -> None:
    pattern = pattern_of(grammar)
    assert pattern is not None
    assert all(re.fullmatch(pattern, text) for text in fits)
    assert not any(re.fullmatch(pattern, text) for text in not_fits)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start "b" | "c"',
        "start: x\nx: y\ny: x",
        "start: missing",
        'other: "a"',
        'start: "a"\n%ignore " "',
        'start: "a"i',
        'start: %json {"type": "object"}',
        "start: "
        + " ".join(["x0"] * 2)
        + "\n"
        + "\n".join(f"x{i}: x{i + 1} x{i + 1}" for i in range(60))
        + '\nx60: "a"',
        "start: x0\n" + "\n".join(f"x{i}: x{i + 1}" for i in range(5000)) + '\nx5000: "a"',
        "no rule at all",
        "",
    ],
    ids=range(11),
)
def test_other_grammars_have_none(grammar: str) -> None:
    assert pattern_of(grammar) is None


def test_the_model_sees_a_function_of_one_text() -> None:
    parameters = CustomTool(type="custom", name="say", description="Says.").offered.parameters
    assert parameters
    assert parameters["properties"] == {"input": {"type": "string"}}
    assert parameters["required"] == ["input"]
    with serving(scripted("x", "{{ tools | tojson }}")) as it:
        made = [
            it.post("/v1/responses", {"input": "go", "tools": [TOOL], "max_output_tokens": 1}),
            it.post("/v1/chat/completions", {"messages": GO, "tools": [CHAT_TOOL], "max_tokens": 1}),
        ]
        sizes = {
            answer.json()["usage"].get("input_tokens", answer.json()["usage"].get("prompt_tokens")) for answer in made
        }
        assert len(sizes) == 1
        assert sizes.pop() > 200


def test_a_call_is_an_item_of_its_own_in_responses() -> None:
    with serving(scripted(CALL)) as it:
        body = {"input": GO, "tools": [FUNCTION, TOOL]}
        made = it.post("/v1/responses", body).json()
        assert made["tools"][1] == TOOL
        (item,) = made["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", PATCH)
        found = events(it, "/v1/responses", body)
        kinds = [event["type"] for event in found]
        assert kinds[2:-1] == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert found[2]["item"]["input"] == ""
        assert found[3]["delta"] == found[4]["input"] == found[5]["item"]["input"] == PATCH
        assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_a_call_and_its_result_are_sent_back() -> None:
    with serving(scripted(CALL)) as it:
        body = {"tools": [TOOL]}
        first = it.post("/v1/responses", {"input": GO, **body}).json()
        call = first["output"][0]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        whole = it.post("/v1/responses", {"input": [*GO, call, result], **body})
        assert whole.status_code == 200, whole.text
        again = it.post("/v1/responses", {"input": [result], "previous_response_id": first["id"], **body})
        assert again.status_code == 200, again.text


def test_a_custom_tool_in_a_namespace_keeps_its_origin() -> None:
    with serving(scripted(CALL.replace('"patch"', '"files__patch"'))) as it:
        space = {"type": "namespace", "name": "files", "description": "", "tools": [TOOL]}
        (item,) = it.post("/v1/responses", {"input": GO, "tools": [space]}).json()["output"]
        assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "patch", "files")


def test_a_call_in_a_chat() -> None:
    with serving(scripted(CALL)) as it:
        body = {"messages": GO, "tools": [CHAT_TOOL]}
        choice = it.post("/v1/chat/completions", body).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": PATCH})
        deltas = [e["choices"][0]["delta"] for e in events(it, "/v1/chat/completions", body)]
        (sent,) = (delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
        assert [(one["index"], one["type"], one["custom"]["input"]) for one in sent] == [(0, "custom", PATCH)]
        chat = [*GO, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
        assert it.post("/v1/chat/completions", {**body, "messages": chat}).status_code == 200
        parsed = it.openai.chat.completions.create(model="toy", messages=GO, tools=[CHAT_TOOL])  # type: ignore[list-item]
        assert parsed.choices[0].message.tool_calls[0].custom.input == PATCH  # type: ignore[index, union-attr]


def test_a_forced_call_keeps_to_a_simple_grammar(talker: Serving) -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "custom", "name": "say"}
    body = {"input": "go", "tools": [SHORT, FUNCTION], "tool_choice": choice, "max_output_tokens": 100}
    made = talker.post("/v1/responses", body).json()
    assert made["tool_choice"] == choice
    assert re.fullmatch("[ab]{3}\n", made["output"][0]["input"])
    streamed = events(talker, "/v1/responses", body)
    assert streamed[-1]["response"]["output"][0]["input"] == made["output"][0]["input"]
    inner = {"syntax": "lark", "definition": 'start: ("a" | "b")~3 LF\n%import common.LF'}
    tool = {"type": "custom", "custom": {"name": "say", "format": {"type": "grammar", "grammar": inner}}}
    named = {"type": "custom", "custom": {"name": "say"}}
    chat = {"messages": GO, "tools": [tool], "tool_choice": named, "max_tokens": 100}
    message = talker.post("/v1/chat/completions", chat).json()["choices"][0]["message"]
    assert re.fullmatch("[ab]{3}\n", message["tool_calls"][0]["custom"]["input"])
    deltas = [e["choices"][0]["delta"] for e in events(talker, "/v1/chat/completions", chat)]
    (sent,) = (delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    assert sent[0]["custom"] == message["tool_calls"][0]["custom"]


def test_a_cut_call_is_returned_as_far_as_it_goes(talker: Serving) -> None:
    pytest.importorskip("llguidance")
    body = {"input": "go", "tools": [SHORT], "tool_choice": "required", "max_output_tokens": 24}
    made = talker.post("/v1/responses", body).json()
    assert made["status"] in ("incomplete", "completed")
    assert made["output"][0]["type"] == "custom_tool_call"


@pytest.mark.parametrize(
    "wrong", [{"format": {"type": "xml"}}, {"name": "a b"}, {"format": {"type": "grammar"}}, {"format": "x"}], ids=str
)
def test_malformed_custom_tools_are_refused(served: Serving, wrong: dict[str, Any]) -> None:
    answer = served.post("/v1/responses", {"input": "go", "tools": [{**TOOL, **wrong}], "max_output_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tools.0")
    chat = {"type": "custom", "custom": {**CHAT_TOOL["custom"], **wrong}}
    answer = served.post("/v1/chat/completions", {"messages": GO, "tools": [chat]})
    assert answer.status_code == 400
    assert "custom." in answer.json()["error"]["message"]


def test_a_conversation_is_compacted_and_goes_on() -> None:
    with serving(scripted("All is well.", "{# tools #}go:")) as it:
        items = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b"}, *GO]
        body = {
            "model": "toy",
            "input": items,
            "instructions": "be brief",
            "tools": [TOOL],
            "parallel_tool_calls": False,
        }
        made = it.post("/v1/responses/compact", body).json()
        assert made["object"] == "response.compaction"
        user, summary = made["output"]
        assert user["content"] == [{"type": "input_text", "text": "go"}]
        assert summary["type"] == "compaction"
        assert unpack_summary(summary["encrypted_content"]) == "Summary of the conversation so far:\n\nAll is well."
        goes_on = it.post("/v1/responses", {"input": [*made["output"], *GO]})
        assert goes_on.status_code == 200
        official = it.openai.responses.compact(model="toy", input=items)  # type: ignore[arg-type]
        assert official.output[-1].type == "compaction"


def test_a_compaction_without_a_summary_is_an_error() -> None:
    with serving(scripted("", "{# tools #}go:")) as it:
        answer = it.post("/v1/responses/compact", {"input": GO})
        assert answer.status_code == 400
        assert "no summary" in answer.json()["error"]["message"]


def test_a_conversation_that_is_too_long_is_compacted_too(served: Serving) -> None:
    items = [{"role": "user", "content": "a" * 300}, *GO]
    with serving(toy_llm(context_length=1024)) as it:
        long = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "ok"}, *GO]
        assert it.post("/v1/responses", {"input": long}).status_code == 400
        assert it.post("/v1/responses/compact", {"input": long}).status_code == 200
    assert served.post("/v1/responses/compact", {"input": items}).status_code == 400  # the question itself is too long


def test_compactions_of_other_servers_leave_a_note(served: Serving) -> None:
    for content in ("gAAAA", "paceline:%%", None, 5):
        assert unpack_summary(content) is None
    items = [{"type": "compaction", "encrypted_content": "gAAAA"}, *GO]
    assert served.post("/v1/responses", {"input": items, "max_output_tokens": 1}).status_code == 200
    assert unpack_summary(pack_summary("äö")) == "Summary of the conversation so far:\n\näö"


def test_models_are_listed_for_other_clients_and_codex_keeps_its_own(served: Serving) -> None:
    listed = served.get("/v1/models").json()
    assert [model["name"] for model in listed["models"]] == [model["id"] for model in listed["data"]]
    assert served.get("/v1/models?client_version=0.145.0").json()["models"] == []
