"""gpt-oss's chat format: reasoning, calls and text from a reply's channels."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paceline.chat import harmony
from paceline.chat.harmony import HarmonyParser
from paceline.chat.thinking import HARMONY, thought_format_of
from tests.support.running import serving
from tests.support.scripted import scripted

TEMPLATE = "go:<|start|>assistant{# tools <|channel|><|message|> #}"
"""A template whose prompt is always the same."""
CHAT: Any = [{"role": "user", "content": "go"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7}<|call|>'
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
SPECIAL = (*harmony.MARKERS, "<|constrain|>")

SPLIT = [
    (f"{ANALYSIS}{FINAL}yes<|return|>", "I add.", "yes"),
    (f"{FINAL}yes", "", "yes"),
    ("<|channel|>analysis<|message|>cut", "cut", ""),
    (f"{ANALYSIS}{CALL}", "I add.", HERMES),
    (f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 7}}<|call|>', "I add.", HERMES),
    (' to=functions.add<|channel|>commentary<|message|>{"a": 7}<|call|>', "", HERMES),
    (f"<|channel|>commentary<|message|>First this.<|end|><|start|>assistant{CALL}", "", f"First this.{HERMES}"),
    (f"<|channel|>commentary<|message|>One.<|end|><|start|>assistant{FINAL}Two.", "", "One.\n\nTwo."),
    (f"{ANALYSIS}{ANALYSIS}{FINAL}yes", "I add.I add.", "yes"),
    ('{"a": 7}', "", '{"a": 7}'),
    ("to", "", "to"),
    ("tomorrow", "", "tomorrow"),
    ("  yes", "", "  yes"),
    ("<|channel|>fin", "", ""),
    (f"{ANALYSIS}<|channel|>", "I add.", ""),
    ("", "", ""),
]


def pieces(text: str, step: int) -> list[str]:
    """Return the text in pieces of this size. Markers stay whole, like tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    cut = [[part] if part in SPECIAL else [part[at : at + step] for at in range(0, len(part), step)] for part in parts]
    return [piece for some in cut for piece in some]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "thought", "answer"), SPLIT)
def test_channels_are_split_however_they_arrive(text: str, thought: str, answer: str, step: int) -> None:
    parser = HarmonyParser()
    parts = [parser.push(piece) for piece in pieces(text, step)]
    parts.append(parser.flush())
    found = "".join(a for a, _ in parts), "".join(b for _, b in parts)
    assert (found[0], found[1].replace(f"\n\n{HERMES}", HERMES)) == (thought, answer)


def test_the_family_is_known_by_its_markers() -> None:
    assert thought_format_of(TEMPLATE) is HARMONY
    assert thought_format_of("<|user|><|end|><|assistant|>") is None, "Phi-3"


def test_a_chat_has_reasoning_text_and_calls_apart() -> None:
    cases: list[tuple[str, str | None, bool]] = [
        (f"{ANALYSIS}{FINAL}It is so.", "It is so.", False),
        (ANALYSIS + CALL, None, True),
    ]
    for text, content, called in cases:
        with serving(scripted(text, TEMPLATE, SPECIAL)) as it:
            for more in ({}, {"reasoning_format": "none"}):
                body = {"messages": CHAT, "max_tokens": 200, "tools": [TOOL], **more}
                choice = it.post("/v1/chat/completions", body).json()["choices"][0]
                message = choice["message"]
                assert (message["reasoning_content"], message["content"]) == ("I add.", content)
                assert (choice["finish_reason"] == "tool_calls") == called
                if called:
                    (call,) = message["tool_calls"]
                    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 7})


def test_json_begins_in_the_final_channel() -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for text in (f'{ANALYSIS}{FINAL}{{"a": 7}}', f'{FINAL}{{"a": 7}}'):
        with serving(scripted(text, TEMPLATE, SPECIAL)) as it:
            body = {"messages": CHAT, "max_tokens": 200, "response_format": form}
            message = it.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            assert message["content"] == '{"a": 7}'
            assert message.get("reasoning_content") == ("I add." if text.startswith(ANALYSIS) else None)


def test_without_reasoning_the_prompt_opens_the_final_channel() -> None:
    with serving(scripted(f"{FINAL}yes", TEMPLATE, SPECIAL)) as it:
        body = {"messages": CHAT, "max_tokens": 200}
        made = [it.post("/v1/chat/completions", {**body, **how}).json() for how in ({}, {"reasoning_effort": "none"})]
        assert [one["choices"][0]["message"]["content"] for one in made] == ["yes", "yes"]
        plain, opened = (one["usage"]["prompt_tokens"] for one in made)
        assert opened == plain + it.post("/tokenize", {"prompt": FINAL}).json()["count"]


def test_the_reasoning_before_a_call_goes_back_to_the_template() -> None:
    template = "{% for m in messages %}{{ m.thinking or '-' }}{% endfor %}{# tools <|channel|><|message|> #}"
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    made = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I add."}
    with serving(scripted("yes", template, SPECIAL)) as it:
        shown = it.post("/tokenize", {"messages": [*CHAT, made]}).json()["count"]
        assert shown == it.post("/tokenize", {"prompt": "-I add."}).json()["count"]
