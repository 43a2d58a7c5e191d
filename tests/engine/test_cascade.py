"""Lookups and a learned drafter in one stack: each has its own draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from paceline.drafters.base import Allowance, Ask, Drafter, DrafterPart
from paceline.drafters.stack import MIN_LOOKUP_PROBABILITY, DrafterStack, DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_length import Controller
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.results import Batch
from paceline.engine.scheduler import Task
from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import Oracle, run, run_together
from paceline.testing.tiny import start
from paceline.types import Draft, DraftBudget
from tests.support.toys import toy_target

PROMPT = [1, 2, 3]


class Clock:
    """A clock that advances only when a test charges time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(DrafterWrapper):
    """A drafter that charges `seconds` for each draft."""

    def __init__(self, inner: Drafter, clock: Clock, seconds: float) -> None:
        super().__init__(inner)
        self._clock, self._seconds, self.asked, self.asks = clock, seconds, 0, list[Ask]()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._clock.now += self._seconds
        self.asked += 1
        self.asks += asks
        return super().propose(asks)


class Lookup(Slow):
    """Drafts every other stretch of ten tokens of a known text."""

    def __init__(self, inner: Drafter, clock: Clock) -> None:
        super().__init__(inner, clock, 0.0)
        self.free = True

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        made = super().propose(asks)
        return [draft if ask.position // 10 % 2 else Draft() for ask, draft in zip(asks, made, strict=True)]


def charged(clock: Clock) -> Decoder:
    """Return a target that charges one second per pass."""
    target = toy_target(layers=1)
    honest = target.forward

    def forward(*args: object) -> object:
        clock.now += 1.0
        return honest(*args)  # type: ignore[arg-type]

    target.forward = forward  # type: ignore[method-assign, assignment]
    return target


def written(seconds: float) -> tuple[float, Slow, Lookup, Controller]:
    """Generate a reply with a learned drafter of this cost in plain rounds.

    Returns:
        Time per token in plain rounds, the drafters, and the controller of the learned drafter.
    """
    clock = Clock()
    target, sampling = charged(clock), Sampling(max_new_tokens=200)
    plain = run(toy_target(layers=1), PROMPT, sampling)[0]
    text = [*PROMPT, *plain]
    lookup, slow = Lookup(Oracle(text, 1.0, 37), clock), Slow(Oracle(text, 1.0, 37), clock, seconds)
    engine = Engine(target, DrafterStack([lookup, slow]), timer=clock)
    rounds = 0
    for _ in range(6):
        tokens, _, stats = run(target, PROMPT, sampling, engine=engine)
        assert tokens == plain
        rounds = stats.rounds
    return rounds / len(plain), slow, lookup, next(iter(engine.policies)).controllers[1]


def test_lookups_go_on_where_a_learned_drafter_does_not_pay() -> None:
    cheap, slow, _, _ = written(0.1)
    dear, idle, lookup, resting = written(50.0)
    assert cheap < 0.35, "both draft"
    assert 0.4 < dear < 0.7, "half of the text is looked up, at full length"
    assert idle.asked < slow.asked / 4
    assert lookup.asked > 100
    assert resting._own.value > 0.2 * resting._all.value, "its rounds count while it rests"


def test_a_disabled_drafter_is_not_asked_in_most_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, chosen, honest = Clock(), list[int](), Controller._seconds
    monkeypatch.setattr(Controller, "_seconds", lambda *given, **named: chosen.append(1) or honest(*given, **named))
    engine = Engine(charged(clock), Slow(Oracle([1], 0.0, 37), clock, 5.0), timer=clock)
    rounds = sum(run(engine.target, PROMPT, Sampling(max_new_tokens=200), engine=engine)[2].rounds for _ in range(4))
    assert rounds > 700
    assert len(chosen) < 0.25 * rounds


def test_a_text_that_lookups_write_does_not_keep_the_learned_drafter_from_another() -> None:
    """Lookups predict all of the first request in a batch, so its prompt is never read, and nothing of the second."""
    clock = Clock()
    target = charged(clock)
    texts = [
        [*prompt, *run(toy_target(layers=1), prompt, Sampling(max_new_tokens=150))[0]] for prompt in ([5] * 60, PROMPT)
    ]

    class First(Slow):
        def __init__(self) -> None:
            super().__init__(Oracle(texts[0], 1.0, 37), clock, 0.0)
            self.free = True

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            return [d if a.token_ids[0] == 5 else Draft() for a, d in zip(asks, super().propose(asks), strict=True)]

    slow = Slow(Oracle(texts[1], 1.0, 37), clock, 0.1)
    engine = Engine(target, DrafterStack([First(), slow]), timer=clock)
    sampling = Sampling(max_new_tokens=150)
    for _ in range(3):
        replies = run_together(engine, [[5] * 60, PROMPT], [sampling] * 2)
    for text, length, (tokens, _, stats) in zip(texts, (60, 3), replies, strict=True):
        assert tokens == text[length:]
        assert stats.rounds < 60
    assert all(ask.token_ids[0] != 5 for ask in slow.asks), "the prompt that it is not asked to read"


def test_a_stack_within_a_stack_drafts_with_all_its_parts() -> None:
    inner = DrafterStack([Suffix(), Oracle([1, 2, 3, 4, 5], 1.0, 37)])
    stack = DrafterStack([Suffix(), inner])
    stack.admit(0, [1, 2])
    ask = Ask(0, Prefix([1, 2], (), 2), DraftBudget.chain(2), Sampling().sampler())
    for parts in ((), (Allowance(DraftBudget.chain(0), 0.0, 0.0), Allowance(DraftBudget.chain(2), 0.0, 0.0))):
        assert stack.propose([replace(ask, parts=parts)])[0].tokens == (3, 4)


def test_lookups_and_learned_drafters_are_two_parts_that_wrappers_keep() -> None:
    model = Oracle([1], 1.0, 37)
    stack = DrafterStack([Suffix(), model])
    assert stack.parts == (DrafterPart(Suffix.draft, True, True), DrafterPart(model.draft, False, True))
    assert DrafterWrapper(stack).parts == stack.parts
    assert DrafterStack([Suffix(), Suffix()]).parts == (DrafterPart(Suffix.draft, True, True),)
    assert DrafterStack([model, Suffix(), Oracle([2], 1.0, 37)]).parts == stack.parts[::-1]


def test_each_part_of_a_cascade_has_a_budget_of_its_own_and_a_draft_says_whose_it_is() -> None:
    stack = DrafterStack([Oracle([1, 2, 3, 4], 1.0, 37), Oracle([1, 2, 7, 8], 1.0, 37)])
    stack._part_of = [0, 1]
    stack.admit(0, [1, 2])
    ask = Ask(0, Prefix([1, 2], (), 2), DraftBudget.chain(9), Sampling().sampler())
    for first, second, tokens, part in ((1, 2, (3,), 0), (0, 2, (7, 8), 1), (2, 0, (3, 4), 0), (0, 0, (), 0)):
        parts = tuple(Allowance(DraftBudget.chain(n), 0.0, 0.0) for n in (first, second))
        (draft,) = stack.propose([replace(ask, parts=parts)])
        assert (draft.tokens, draft.part) == (tokens, part)


class Watched(DrafterWrapper):
    """Records the length of the reply and the required confidence at each request."""

    def __init__(self, inner: Drafter, free: bool, reads_prompt: bool = True) -> None:
        super().__init__(inner)
        self.free, self.reads_prompt, self.asked = free, reads_prompt, dict[int, set[float]]()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        for ask in asks:
            self.asked.setdefault(ask.position + 1 - len(PROMPT), set()).add(ask.sure)
        return super().propose(asks)


@pytest.mark.parametrize(("free", "reads_prompt"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("remembers", [False, True])
def test_the_first_token_waits_for_no_drafter_that_reads_the_prompt(
    free: bool, reads_prompt: bool, remembers: bool
) -> None:
    target, sampling = toy_target(layers=1), Sampling(max_new_tokens=30)
    plain = run(target, PROMPT, sampling)[0]
    drafter = Watched(Oracle([*PROMPT, *plain], 1.0, 37), free, reads_prompt)
    engine = Engine(target, drafter, timer=count().__next__)
    if remembers:
        engine.remember(1 << 20)
    for length in (30, 30, 2, 1):
        assert run(target, PROMPT, replace(sampling, max_new_tokens=length), engine=engine)[0] == plain[:length]
    assert (min(drafter.asked) == 0) == (free or not reads_prompt)


def test_lookups_hold_back_only_for_a_drafter_that_is_asked() -> None:
    """In the first round, no other drafter drafts, even if the model drafted much in the previous reply."""
    clock, sampling = Clock(), Sampling(max_new_tokens=100)
    target = charged(clock)
    plain = run(target, PROMPT, sampling)[0]
    text = [*PROMPT, *plain]
    lookup = Watched(Lookup(Oracle(text, 1.0, 37), clock), free=True)
    model = Slow(Oracle(text, 1.0, 37), clock, 0.1)
    engine = Engine(target, DrafterStack([lookup, model]), timer=clock)
    for _ in range(4):
        run(target, PROMPT, sampling, engine=engine)
    assert lookup.asked.pop(0) == {0.0}
    assert any(MIN_LOOKUP_PROBABILITY in sures for sures in lookup.asked.values())


def test_each_part_notes_once_that_a_text_begins() -> None:
    """A part starts later if other tokens are known or lookups draft."""
    target, sampling = toy_target(layers=1), Sampling(max_new_tokens=40)
    plain = run(target, PROMPT, sampling)[0]
    engine = Engine(target, DrafterStack([Watched(Oracle([0], 1.0, 37), True), Oracle([*PROMPT, *plain], 1.0, 37)]))
    begun: list[Controller] = []
    for controller in next(iter(engine.policies)).controllers:
        controller._begin = lambda share, of=controller: begun.append(of)  # type: ignore[method-assign]

    def predicted(source: Request | None) -> Request:
        request = start(engine, PROMPT, sampling, (), source)
        request.expect(plain[:3])
        return request

    for turn in range(1, 4):
        for _ in Batch(engine, [Task(predicted)], 1):
            pass
        assert [begun.count(c) for c in next(iter(engine.policies)).controllers] == [turn, turn]
