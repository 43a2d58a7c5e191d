"""Thinking budgets of every API: the reasoning ends at the budget, and the answer follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.chat import harmony
from tests.support.running import Serving, serving
from tests.support.scripted import TEMPLATE, scripted

CHAT: Any = [{"role": "user", "content": "go"}]
THOUGHT = "I think and think, over and over, and find no end. "
SPECIAL = ("<think>", "</think>")
BUDGET = 9
FIELDS: list[dict[str, Any]] = [
    {"thinking_budget": BUDGET},
    {"thinking_budget_tokens": BUDGET},
    {"thinking_token_budget": BUDGET},
    {"reasoning_budget": BUDGET},
    {"reasoning_budget_tokens": BUDGET},
    {"reasoning": {"max_tokens": BUDGET}},
    {"thinking": {"type": "enabled", "budget_tokens": BUDGET}},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Serving]:
    with serving(scripted("<think>" + THOUGHT * 9, TEMPLATE, SPECIAL)) as it:
        yield it


def spent(it: Serving, text: str) -> bool:
    """Return True if a reasoning is a prefix of the model's reasoning and as long as the budget."""
    words = it.llm.tokenizer
    return words.encode(THOUGHT * 9, special=False)[:BUDGET] == words.encode(text, special=False)


def message(it: Serving, **more: Any) -> dict[str, Any]:
    made = it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 60, **more})
    assert made.status_code == 200, made.text
    found: dict[str, Any] = made.json()["choices"][0]["message"]
    return found


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_every_name_of_the_budget_ends_the_reasoning(thinker: Serving, fields: dict[str, Any]) -> None:
    drafted, plain = message(thinker, **fields), message(thinker, **fields, speculation="off")
    assert drafted == plain
    assert spent(thinker, drafted["reasoning_content"])
    assert drafted["content"]


def test_no_budget_is_no_limit(thinker: Serving) -> None:
    for fields in ({}, {"thinking_budget": -1}, {"thinking_budget": None}, {"reasoning": {"max_tokens": -1}}):
        assert len(message(thinker, **fields)["reasoning_content"]) > 80


def test_budgets_that_differ_are_refused(thinker: Serving) -> None:
    for fields in (
        {"thinking_budget": 3, "reasoning_budget": 4},
        {"thinking_budget": 3, "reasoning": {"max_tokens": 4}},
        {"thinking_budget": -2},
    ):
        assert thinker.post("/v1/chat/completions", {"messages": CHAT, **fields}).status_code == 400
        assert thinker.post("/v1/messages", {"messages": CHAT, "max_tokens": 9, **fields}).status_code == 400


def test_anthropics_and_openais_other_api(thinker: Serving) -> None:
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    made = thinker.post("/v1/messages", {"messages": CHAT, "max_tokens": 60, "thinking": thinking}).json()
    assert [block["type"] for block in made["content"]] == ["thinking", "text"]
    assert spent(thinker, made["content"][0]["thinking"])
    body = {"input": CHAT, "max_output_tokens": 60, "reasoning": {"max_tokens": BUDGET}}
    output = thinker.post("/v1/responses", body).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert spent(thinker, output[0]["content"][0]["text"])


def test_a_budget_holds_where_the_reasoning_is_not_split_off(thinker: Serving) -> None:
    raw = message(thinker, thinking_budget=BUDGET, reasoning_format="none")["content"]
    assert raw != message(thinker, reasoning_format="none")["content"]


@pytest.mark.parametrize("special", [(), SPECIAL])
@pytest.mark.parametrize("begun", ["", "<think>\n"])
@pytest.mark.parametrize("budget", [0, BUDGET])
def test_an_answer_of_a_schema_follows_the_budget(special: tuple[str, ...], begun: str, budget: int) -> None:
    pytest.importorskip("llguidance")
    with serving(
        scripted(f"<think>{THOUGHT * 9}".removeprefix("<think>" if begun else ""), TEMPLATE + begun, special)
    ) as it:
        made = message(it, thinking_budget=budget, guided_json=SCHEMA, temperature=0, max_tokens=200)
        assert made == message(it, thinking_budget=budget, guided_json=SCHEMA, max_tokens=200, speculation="off")
        assert spent(it, made["reasoning_content"]) if budget else "reasoning_content" not in made
        assert isinstance(json.loads(made["content"])["a"], int)


@pytest.mark.parametrize("special", [(), SPECIAL])
def test_a_budget_is_ignored_if_a_grammar_has_no_reasoning(special: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance")
    fields = {"guided_json": SCHEMA, "reasoning_format": "none", "temperature": 0}
    with serving(scripted(THOUGHT * 9, TEMPLATE + "<think>\n", special)) as it:
        made = message(it, thinking_budget=2, **fields)
        assert made == message(it, **fields)
        assert isinstance(json.loads(made["content"])["a"], int)


def test_harmony_goes_on_in_the_final_channel() -> None:
    template = f"{{# {harmony.CHANNEL} {harmony.MESSAGE} #}}go:"
    text = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}{THOUGHT * 9}"
    with serving(scripted(text, template, harmony.MARKERS)) as it:
        made = message(it, thinking_budget=BUDGET)
        assert THOUGHT.startswith(made["reasoning_content"])
        assert made["content"]
        assert message(it)["reasoning_content"].startswith(THOUGHT)
        pytest.importorskip("llguidance")
        formed = message(it, thinking_budget=BUDGET, guided_json=SCHEMA, max_tokens=200)
        assert formed["reasoning_content"] == made["reasoning_content"]
        assert isinstance(json.loads(formed["content"])["a"], int)
        made = message(it, thinking_budget=0)
        assert "reasoning_content" not in made
        assert made["content"]


def test_a_model_that_does_not_reason_takes_any_budget() -> None:
    with serving(scripted("yes", "go:")) as it:
        assert message(it, thinking_budget=0)["content"] == "yes"
