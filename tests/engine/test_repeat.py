"""A failed round is repeated if none of it is committed, and never after that."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.model import DraftModel
from paceline.engine import engine as engines
from paceline.engine.engine import Engine
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.models.heads import ExitConfig
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.cover import some
from tests.support.toys import toy_model, toy_target

PROMPTS = ["hello", "abcabc", "x"]


@some("failing", [1, 2, 3, 5, 8], fast=["1", "2", "5"])
def test_a_commit_that_fails_half_way_is_repeated(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    how = Sampling(max_new_tokens=24, temperature=0.9, seed=4)
    alone = [LLM(toy_model(), None).generate(prompt, how).token_ids for prompt in PROMPTS]
    llm = LLM(toy_model(), DraftModel(toy_target(layers=1), 37), draft=DraftBudget(12, 4, 4))
    cache, calls = llm.engine.cache, 0
    move = cache._move  # type: ignore[attr-defined]

    def moved(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("no memory to move rows")
        move(*given)

    monkeypatch.setattr(cache, "_move", moved)
    assert [done.token_ids for done in llm.generate(PROMPTS, how)] == alone
    assert calls > failing


def test_an_error_after_the_commit_ends_the_round_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    how = Sampling(max_new_tokens=24)
    alone = LLM(toy_model(), None).generate("hello", how).token_ids
    llm, rounds = LLM(toy_model(), None), 0

    def learn(*_: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 4:
            raise RuntimeError("learning failed")

    monkeypatch.setattr(engines, "learn", learn)
    with llm.stream("hello", how) as stream:
        shown = []
        with pytest.raises(RuntimeError, match="learning failed"):
            shown += [chunk.token_id for chunk in stream]
        assert list(stream) == [], "an error is raised once"
    assert stream.completion.token_ids == alone[:4]


def test_an_early_exit_drafter_serves_one_engine_at_a_time() -> None:
    target = toy_target()
    drafter = EarlyExit(ExitConfig(target.config.hidden, 2), {}, target)
    engine = Engine(target, drafter)
    with pytest.raises(InvalidOption, match="two models at once"):
        Engine(target, drafter)
    del engine
    Engine(target, drafter)
