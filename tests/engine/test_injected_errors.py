"""An error at a random moment of one request leaves no trace: the next request gets the same reply as before."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from paceline.cache.slots import SlotTable
from paceline.drafters.cached import CachedDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.errors import OutOfMemory
from paceline.llm import LLM
from paceline.models.heads import ExitConfig
from paceline.sampling.grammar import Grammar
from paceline.types import DraftBudget
from tests.support.inject import raising
from tests.support.tiny_heads import eagle_config, eagle_tensors
from tests.support.toys import toy_model, toy_target

MODEL = toy_model(layers=2)
EAGLE = eagle_config()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
FIRST, SECOND = (
    {"max_new_tokens": 12, "temperature": 0.0},
    {"max_new_tokens": 12, "temperature": 0.9, "seed": 5, "repetition_penalty": 1.2},
)


@dataclass
class Case:
    """A model, the cached drafters in it, and its answers to the fixed questions."""

    llm: LLM
    cached: list[CachedDrafter[Any]]
    answers: list[list[int]]

    def ask(self) -> list[list[int]]:
        return [self.llm.generate(PROMPT, **how).token_ids for how in (FIRST, SECOND)]

    def leaks(self) -> list[int]:
        """Return the number of occupied slots in each cache."""
        caches = [self.llm.engine.cache, *(drafter._cache for drafter in self.cached)]
        tables = [one for one in caches if isinstance(one, SlotTable)]
        return [len(table.lengths) - len(table._free) for table in tables]


def _stack() -> list[Any]:
    return [Suffix(remember=True, limit=200), Eagle(EAGLE, eagle_tensors(EAGLE), MODEL.target)]


DRAFTERS: dict[str, Callable[[], list[Any]]] = {
    "lookups": lambda: [Suffix(remember=True), NGram()],
    "lookups and a head": _stack,
    "a model": lambda: [NGram(), DraftModel(toy_target(seed=9, layers=1), 37)],
    "early exit": lambda: [EarlyExit(ExitConfig(32, 1), {}, MODEL.target, threshold=0.0)],
}
SIZES = {"auto": None, "tree": DraftBudget(8, 3, 2)}


def _closed(llm: LLM) -> None:
    with llm.stream(PROMPT, **SECOND) as stream:
        next(stream)


def _refused(prefix: Any, row: Any) -> Any:
    if len(prefix.reply) > 3:
        raise RuntimeError("a user's processor")
    return row


REQUESTS: dict[str, Callable[[LLM], Any]] = {
    "one": lambda llm: llm.generate(PROMPT, **FIRST),
    "two samples": lambda llm: llm.generate(PROMPT, n=2, **SECOND),
    "batch": lambda llm: llm.generate([PROMPT, [3], PROMPT * 3], width=2, **SECOND),
    "closed early": _closed,
    "prediction": lambda llm: llm.generate(PROMPT[:4], prediction=PROMPT, **FIRST),
    "grammar": lambda llm: llm.generate(PROMPT, grammar=Grammar.regex("[a-f]{6}"), **FIRST),
    "rejection": lambda llm: llm.generate(PROMPT, **SECOND, rule="rejection"),
    "all banned": lambda llm: llm.generate(PROMPT[:3], logit_bias=dict.fromkeys(range(37), -float("inf")), **FIRST),
    "a processor that fails": lambda llm: llm.generate(PROMPT[:3], processors=[_refused], **SECOND),
}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: RuntimeError("injected"),
    "no memory": lambda: OutOfMemory("injected", "Use less"),
    "no memory for Python": MemoryError,
    "Ctrl-C": KeyboardInterrupt,
}


def made(drafter: str, size: str) -> Case:
    """Return a new model with its drafters."""
    parts = DRAFTERS[drafter]()
    llm = LLM(MODEL, DrafterStack(parts) if len(parts) > 1 else parts[0], SIZES[size])
    llm.engine.remember(1 << 22)
    one = Case(llm, [part for part in parts if isinstance(part, CachedDrafter)], [])
    one.answers = answers()
    return one


@cache
def answers() -> list[list[int]]:
    """Return the answers of plain decoding."""
    return Case(LLM(MODEL), [], []).ask()


known = cache(made)
"""Return a cached model, which has already had other errors."""


@cache
def moments(drafter: str, size: str, request: str, lines: bool) -> int:
    """Return the number of moments of a request."""
    with raising(None, 0, lines) as passed:
        _attempt(made(drafter, size).llm, request)
    return passed.count


def _attempt(llm: LLM, request: str) -> None:
    try:
        REQUESTS[request](llm)
    except (Exception, KeyboardInterrupt):
        return


def run(seed: int) -> None:
    draw = random.Random(seed)
    drafter, size, request = (draw.choice(list(x)) for x in (DRAFTERS, SIZES, REQUESTS))
    lines, kind = draw.random() < 0.5, draw.choice(list(ERRORS))
    # In half of the runs, the error occurs in a model's first request, before any measurement.
    one = draw.choice([known, made])(drafter, size)
    # Early moments matter most, because slots are acquired then.
    moment = 1 + int(moments(drafter, size, request, lines) * draw.random() ** 2)
    with raising(ERRORS[kind](), moment, lines):
        _attempt(one.llm, request)
    what = f"{seed}: {kind} at {'line' if lines else 'call'} {moment} of {request!r} with {drafter!r}, {size}"
    assert one.ask() == one.answers, f"{what} changed later answers"
    # If the error occurs in the release itself, the next request releases the slot. The same applies if a request was
    # collected as garbage during a pass.
    if any(one.leaks()):
        gc.collect()
        one.ask()
    assert not any(one.leaks()), f"{what} left slots taken"
    assert one.llm.engine._depth == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of errors within `__del__`
def test_an_error_at_a_random_moment_changes_no_later_reply() -> None:
    for seed in range(8):
        run(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_thousand_errors_change_no_later_reply() -> None:
    for seed in range(1000, 3000):
        run(seed)
