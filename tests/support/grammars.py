"""Grammars for tests, checks of their replies, and matchers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.factory import make_drafter
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from paceline.sampling.grammar_matcher import Matcher
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Sampler
from paceline.testing import Oracle
from paceline.text.tokenizer import Tokenizer
from paceline.types import DraftBudget
from tests.support.vocabularies import byte_level, renumbered, speaker

WORDS = byte_level()
SIZE = max(WORDS.vocabulary.values()) + 1
END = WORDS.vocabulary["</s>"]
SPACES = [token for token, said in WORDS.token_bytes.items() if said.isspace()]

PERSON = {
    "type": "object",
    "properties": {
        "full_name_of_the_person": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["alpha", "beta", "naïve ☃", 3, None]},
        "version": {"const": "a rather long constant that leaves no choice at all"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "at": {"$ref": "#/$defs/point"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2}$"},
        "either": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    },
    "required": ["full_name_of_the_person", "age", "kind", "version", "tags", "at", "code", "either"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NESTED = 'start: "(" start ")" | "[" start "]" | "x"'

Valid = Callable[[str], object]


def full(pattern: str) -> Valid:
    return lambda text: re.fullmatch(pattern, text)


def balanced(text: str) -> bool:
    while (shorter := text.replace("(x)", "x").replace("[x]", "x")) != text:
        text = shorter
    return text == "x"


GRAMMARS: dict[str, tuple[Grammar, Valid]] = {
    "schema": (Grammar.json_schema(PERSON), lambda text: person(json.loads(text))),
    "spaced": (Grammar.json_schema({"enum": [{"a": 1}, [True, None]]}, whitespace=True), json.loads),
    "nothing": (Grammar.json_schema({"type": "object", "additionalProperties": False}), lambda text: text == "{}"),
    "empty": (Grammar.regex(""), lambda text: text == ""),
    "digits": (Grammar.regex(r"[0-9]{3}(-[0-9]{2})?"), full(r"[0-9]{3}(-[0-9]{2})?")),
    "letters": (Grammar.regex("(é|日本|☃|naïve){2,5}"), full("(é|日本|☃|naïve){2,5}")),
    "literal": (Grammar.regex("The quick answer isn't always the best one: about 40% of all readers."), len),
    "nested": (Grammar.lark(NESTED), balanced),
}


def person(said: Any) -> bool:
    """Check a value against `PERSON` without a library."""
    assert list(said) == PERSON["required"]
    assert len(said["full_name_of_the_person"]) <= 6
    assert 0 <= said["age"] <= 99
    assert said["kind"] in PERSON["properties"]["kind"]["enum"]  # type: ignore[index]
    assert said["version"] == PERSON["properties"]["version"]["const"]  # type: ignore[index]
    assert len(said["tags"]) <= 3
    assert "x" in said["at"]
    assert set(said["at"]) <= {"x", "y"}
    assert re.fullmatch("[A-Z]{2}-[0-9]{2}", said["code"])
    assert said["either"] is None or 0 <= said["either"] <= 9
    return True


def how(grammar: Grammar, temperature: float, **more: Any) -> Sampling:
    return Sampling(max_new_tokens=240, temperature=temperature, seed=5, grammar=grammar, **more)


def undrafted(llm: LLM, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the reply without drafts."""
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "forced", lambda self, prefix, limit: [])
        out = llm.generate("Hi", sampling)
    assert out.stats.drafted == 0
    return out.token_ids


class Unruly(Oracle):
    """An oracle whose drafts continue with arbitrary tokens after the end of the reply."""

    def __init__(self, text: Sequence[int], accuracy: float) -> None:
        super().__init__([*text, END, 7, 8, END, 9, END, END], accuracy, SIZE)


def oracle(accuracy: float) -> Callable[[LLM, Sequence[int]], Drafter]:
    return lambda llm, reply: Unruly([*llm.encode("Hi"), *reply], accuracy)


def draft_model(make: Callable[[LLM], Loaded]) -> Callable[[LLM, Sequence[int]], Drafter]:
    return lambda llm, reply: make_drafter("model:any", llm.model, lambda reference: make(llm))


DRAFTERS: dict[str, tuple[Callable[[LLM, Sequence[int]], Drafter], DraftBudget]] = {
    "right": (oracle(1.0), DraftBudget.chain(7)),
    "often right": (oracle(0.7), DraftBudget(14, 5, 3)),
    "wrong": (oracle(0.0), DraftBudget.chain(4)),
    "suffix": (lambda llm, reply: Suffix(), DraftBudget(9, 4, 2)),
    "itself": (draft_model(lambda llm: llm.model), DraftBudget.chain(4)),
    "itself, trees": (draft_model(lambda llm: llm.model), DraftBudget(10, 4, 3)),
    "another model": (draft_model(lambda llm: speaker(WORDS, seed=8)), DraftBudget(8, 3, 2)),
    "another vocabulary": (draft_model(lambda llm: renumbered(WORDS, seed=8)), DraftBudget.chain(3)),
}
"""Name -> function from a model and its known reply to a drafter, and the draft budget."""


def matcher(grammar: Grammar, words: Tokenizer = WORDS, **more: Any) -> Matcher:
    size = max(words.vocabulary.values()) + 1
    return grammar.matcher(words, size, [words.vocabulary["</s>"]], **more)


def allowed(rows: Matcher, text: Sequence[int], path: Sequence[int] = (), size: int = SIZE) -> set[int]:
    """Return the tokens that may follow a text and a path. The whole text is the reply."""
    row = rows(Prefix(list(text), path, 0), torch.zeros(size, dtype=torch.float64))
    return set(torch.nonzero(row == 0)[:, 0].tolist())
