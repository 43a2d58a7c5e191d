"""Lookups and a learned drafter in one stack: each has a draft length of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.drafters.base import Ask, Drafter, Stage
from paceline.drafters.stack import DrafterStack, DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run, tiny_target
from paceline.types import Draft

PROMPT = [1, 2, 3]


class Clock:
    """Time passes only where somebody charges it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(DrafterWrapper):
    """Charges `seconds` for a draft."""

    def __init__(self, inner: Drafter, clock: Clock, seconds: float) -> None:
        super().__init__(inner)
        self._clock, self._seconds, self.asked = clock, seconds, 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._clock.now += self._seconds
        self.asked += 1
        return super().propose(asks)


class Lookup(Slow):
    """Looks up, in a text that it knows, every other stretch of ten tokens."""

    def __init__(self, inner: Drafter, clock: Clock) -> None:
        super().__init__(inner, clock, 0.0)
        self.free = True

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        made = super().propose(asks)
        return [draft if ask.position // 10 % 2 else Draft() for ask, draft in zip(asks, made, strict=True)]


def written(seconds: float) -> tuple[float, Slow, Lookup]:
    """Rounds per token of plain decoding, with a learned drafter of this price, in rounds of a plain pass."""
    clock, target = Clock(), tiny_target()
    honest = target.forward

    def forward(*args: object) -> object:
        clock.now += 1.0
        return honest(*args)  # type: ignore[arg-type]

    sampling = Sampling(max_new_tokens=200)
    plain = run(tiny_target(), PROMPT, sampling)[0]
    target.forward = forward  # type: ignore[method-assign, assignment]
    text = [*PROMPT, *plain]
    lookup, slow = Lookup(Oracle(text, 1.0, 37), clock), Slow(Oracle(text, 1.0, 37), clock, seconds)
    engine = Engine(target, DrafterStack([lookup, slow]), timer=clock)
    rounds = 0
    for _ in range(6):
        tokens, _, stats = run(target, PROMPT, sampling, engine=engine)
        assert tokens == plain
        rounds = stats.rounds
    return rounds / len(plain), slow, lookup


def test_lookups_go_on_where_a_learned_drafter_does_not_pay() -> None:
    cheap, slow, _ = written(0.1)
    dear, idle, lookup = written(50.0)
    assert cheap < 0.35, "both draft"
    assert 0.4 < dear < 0.7, "half of the text is looked up, at full length"
    assert idle.asked < slow.asked / 4
    assert lookup.asked > 100


def test_stages_are_runs_of_one_kind_and_reach_through_wrappers() -> None:
    model = Oracle([1], 1.0, 37)
    stack = DrafterStack([Suffix(), model])
    assert stack.stages == (Stage(Suffix.draft, True), Stage(model.draft, False))
    assert DrafterWrapper(stack).stages == stack.stages
    assert DrafterStack([Suffix(), Suffix()]).stages == (Stage(Suffix.draft, True),)
    with pytest.raises(IndexError):
        stack.propose([Ask(0, None, stack.draft, None, stage=2)])  # type: ignore[arg-type]
