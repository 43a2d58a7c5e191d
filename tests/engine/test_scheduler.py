"""The order of requests, the other requests in the batch, and drafts do not change a reply."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterWrapper
from paceline.drafters.suffix import Suffix
from paceline.engine.detokenizer import TextStream
from paceline.engine.draft_policy import SPECULATION_OFF, Speculation
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, Task
from paceline.engine.stats import Stats
from paceline.errors import NonFiniteLogits, OutOfMemory, TimedOut
from paceline.models.heads import ExitConfig
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import Oracle, run
from paceline.types import Draft, DraftBudget, Forward, Rows, Tap, Verdict, Want
from paceline.verify.tree import PREFILL_ROWS
from tests.support.tiny_heads import TINY_MEDUSA, eagle_config, eagle_tensors, medusa_tensors
from tests.support.toys import toy_target

TOY = toy_target(context_length=2048)


def drafters() -> dict[str, Drafter]:
    """Return one drafter of every kind."""
    eagle = eagle_config()
    return {
        "suffix": Suffix(),
        "ngram": NGram(),
        "model": DraftModel(toy_target(seed=1, context_length=2048), 37),
        "eagle": Eagle(eagle, eagle_tensors(eagle), TOY),
        "medusa": Medusa(TINY_MEDUSA, medusa_tensors(TINY_MEDUSA), TOY),
        "exit": EarlyExit(ExitConfig(16, 1), {}, TOY),
    }


NAMES = tuple(drafters())


def begin(engine: Engine, prompt: Sequence[int], sampling: Sampling, how: Speculation, like: Request | None) -> Request:
    stream = TextStream(sampling, (), lambda ids: "", engine.target.context_length - len(prompt))
    return engine.start(prompt, sampling.sampler(), stream, Stats(0, "rounding"), like, how)


def task(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, how: Speculation = SPECULATION_OFF, **more: object
) -> Task:
    return Task(partial(begin, engine, prompt, sampling, how), prompt, **more)  # type: ignore[arg-type]


def finish(scheduler: Scheduler) -> dict[Task, list[int]]:
    """Return all further chunks of each task."""
    shown: dict[Task, list[int]] = {}
    while scheduler.busy:
        for one, chunks in scheduler.turn():
            shown.setdefault(one, []).extend(chunk.token_id for chunk in chunks)
    return shown


SAMPLINGS = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.2]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    stop_token_ids=st.sampled_from([(), (3, 9, 20)]),
    seed=st.integers(0, 99),
)
SIZES = st.sampled_from([None, DraftBudget.chain(0), DraftBudget.chain(2), DraftBudget(9, 3, 3)])
SPECULATIONS = st.builds(Speculation, st.sampled_from([None, *NAMES]), SIZES)
PROMPTS = st.lists(st.integers(0, 36), min_size=1, max_size=40)
COMING = st.tuples(st.integers(0, 12), PROMPTS, SAMPLINGS, SPECULATIONS, st.sampled_from([None, None, None, 3, 9]))


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    coming=st.lists(COMING, min_size=1, max_size=9),
    width=st.integers(1, 6),
    quota=st.sampled_from([1, 7, PREFILL_ROWS]),
    room=st.sampled_from([40, 150, 10_000]),
)
def test_a_reply_equals_the_reply_to_its_prompt_without_others(
    coming: list[tuple[int, list[int], Sampling, Speculation, int | None]], width: int, quota: int, room: int
) -> None:
    """Arrival times, sampling, drafters, slots, memory and disconnecting clients do not change a text."""
    engine = Engine(TOY, drafters())
    scheduler = Scheduler(engine, width, quota, lambda lengths: sum(lengths) <= room)
    due = sorted(coming, key=lambda one: one[0])
    tasks = [task(engine, prompt, sampling, how) for _, prompt, sampling, how, _ in due]
    shown: dict[Task, list[int]] = {one: [] for one in tasks}
    turn = 0
    while scheduler.busy or turn <= due[-1][0]:
        for (when, *_, leaves), one in zip(due, tasks, strict=True):
            if when == turn:
                scheduler.add(one)
            if leaves is not None and when + leaves == turn:
                one.cancelled = True
        for one, chunks in scheduler.turn():
            shown[one] += [chunk.token_id for chunk in chunks]
        turn += 1
    for (_, prompt, sampling, _, leaves), one in zip(due, tasks, strict=True):
        plain = run(TOY, prompt, sampling)[0]
        assert one.done
        assert one.error is None
        assert shown[one] == (plain if leaves is None else plain[: len(shown[one])])
    assert [engine.cache.lengths[slot] for slot in range(len(engine.cache.lengths))] == [0] * len(engine.cache.lengths)


def test_a_text_depends_on_the_seed_so_the_comparison_above_can_fail() -> None:
    texts = [run(TOY, [1, 2, 3], Sampling(max_new_tokens=12, temperature=1.0, seed=seed))[0] for seed in range(4)]
    assert len(set(map(tuple, texts))) == 4


def test_a_long_prompt_does_not_stall_running_replies() -> None:
    engine = Engine(TOY)
    engine.__dict__["chunk_invariant"] = True  # on machines too whose float64 products depend on a pass's size
    scheduler = Scheduler(engine, 4, quota=10, clock=lambda: 0.0)
    first, long = task(engine, [1, 2], Sampling(max_new_tokens=90)), task(engine, [5] * 300, Sampling(max_new_tokens=2))
    scheduler.add(first)
    scheduler.turn()
    scheduler.add(long)
    written = 0
    while long is not scheduler.running[-1]:
        events = scheduler.turn()
        written += sum(len(chunks) for one, chunks in events if one is first)
    assert written >= 29, "a round for each ten tokens of the prompt"


def test_a_first_token_does_not_wait_for_other_prompts() -> None:
    engine = Engine(TOY)
    engine.__dict__["chunk_invariant"] = True
    scheduler = Scheduler(engine, 8, quota=20, clock=lambda: 0.0)
    short, *others = (task(engine, [1] * n, Sampling(max_new_tokens=50)) for n in (10, 90, 90))
    for one in (short, *others):
        scheduler.add(one)
    assert [one for one, chunks in scheduler.turn() if chunks] == [short]
    assert engine.cache.lengths == [10, 11], "20 tokens, and not the 60 that may be fed while three tasks wait"
    assert [one for one, chunks in scheduler.turn() if chunks] == [short]
    assert engine.cache.lengths == [11, 31]


def test_the_oldest_comes_first_and_samples_share_a_prefill() -> None:
    fed: list[int] = []

    class Watched(type(TOY)):  # type: ignore[misc]
        def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
            if rows.prefill:
                fed.append(rows.tokens.shape[1])
            return super().forward(rows, cache, want)

    target = toy_target(context_length=2048)
    target.__class__ = Watched
    engine = Engine(target)
    scheduler = Scheduler(engine, 2)
    prompt, how = [7] * 60, Sampling(max_new_tokens=4, temperature=1.0, seed=3)
    tasks = [task(engine, prompt, how, group="a") for _ in range(3)]
    for one in tasks:
        scheduler.add(one)
    scheduler.turn()
    assert scheduler.running == tasks[:2]
    assert list(scheduler.waiting) == tasks[2:]
    finish(scheduler)
    assert len(fed) <= 2, "the second sample began with the first one's prompt"


def test_seats_go_round_the_clients_and_not_to_who_asks_most() -> None:
    engine = Engine(TOY)
    scheduler = Scheduler(engine, 3)
    many = [task(engine, [1, 2, i], Sampling(max_new_tokens=9), client="greedy") for i in range(6)]
    few = [task(engine, [3, 4, i], Sampling(max_new_tokens=9), client="modest") for i in range(2)]
    for one in (*many, *few):
        scheduler.add(one)
    scheduler.turn()
    assert scheduler.running == [many[0], few[0], many[1]]
    finish(scheduler)
    assert all(one.done and not one.error for one in (*many, *few))


def test_cached_prefixes_give_way_to_running_replies() -> None:
    target, short = toy_target(context_length=2048), [False]
    honest = target.forward
    engine = Engine(target)
    engine.prefixes = PrefixCache(1 << 20, chunk_invariant=True)

    def full(rows: Rows, cache: KVCache, want: Want) -> Forward:
        if short[0] and engine.prefixes and engine.prefixes.nbytes:
            raise OutOfMemory("no memory", "Use less")
        return honest(rows, cache, want)

    target.forward = full  # type: ignore[method-assign]
    scheduler = Scheduler(engine, 2)
    how = Sampling(max_new_tokens=9)
    for _ in range(2):
        one = task(engine, [5, 6, 7, 8], how)
        scheduler.add(one)
        assert finish(scheduler)[one] == run(TOY, [5, 6, 7, 8], how)[0]
        assert one.error is None
        short[0] = True


def test_a_late_reply_ends_with_an_error_and_the_others_go_on() -> None:
    engine, now = Engine(TOY), 0.0
    scheduler = Scheduler(engine, 2, clock=lambda: now)
    slow = task(engine, [1, 2], Sampling(max_new_tokens=50), deadline=5.0)
    other = task(engine, [3, 4], Sampling(max_new_tokens=8))
    waits = task(engine, [3, 4], Sampling(max_new_tokens=8), deadline=4.0)
    for one in (slow, other, waits):
        scheduler.add(one)
    scheduler.turn()
    now = 6.0
    assert {one for one, _ in scheduler.turn() if one.done} == {slow, waits}
    assert isinstance(slow.error, TimedOut)
    assert isinstance(waits.error, TimedOut)
    assert len(finish(scheduler)[other]) + 2 == 8


def test_a_failed_request_ends_no_other_request() -> None:
    def broken(prefix: Prefix, logits: Tensor) -> Tensor:
        return logits * torch.nan if len(prefix) > 6 else logits

    engine = Engine(TOY)
    scheduler = Scheduler(engine, 4)
    how = Sampling(max_new_tokens=12)
    good = [task(engine, prompt, how) for prompt in ([1, 2, 3], [9, 8])]
    bad = task(engine, [4, 5], Sampling(max_new_tokens=12, processors=[broken]))
    never = task(engine, [4, 5], how, Speculation("nobody"))
    for one in (good[0], bad, never, good[1]):
        scheduler.add(one)
    shown = finish(scheduler)
    assert isinstance(bad.error, NonFiniteLogits)
    assert "no drafter 'nobody'" in str(never.error)
    assert [shown[one] for one in good] == [run(TOY, [1, 2, 3], how)[0], run(TOY, [9, 8], how)[0]]
    assert not any(engine.cache.lengths)


class Bad(DrafterWrapper):
    """Fails for one request, at its third draft."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if any(len(ask.token_ids) > 5 and ask.token_ids[0] == 4 for ask in asks):
            raise ValueError("a drafter of somebody's own")
        return super().propose(asks)


def test_a_drafter_that_fails_for_one_request_takes_no_other_with_it() -> None:
    engine = Engine(TOY, Bad(Oracle([], 0.3, 37)), DraftBudget.chain(2))
    scheduler = Scheduler(engine, 4)
    how, drafted = Sampling(max_new_tokens=12), engine.policies.default
    good, bad = task(engine, [1, 2, 3], how, drafted), task(engine, [4, 5], how, drafted)
    scheduler.add(good)
    scheduler.add(bad)
    shown = finish(scheduler)
    assert isinstance(bad.error, ValueError)
    assert shown[good] == run(TOY, [1, 2, 3], how)[0]


@pytest.mark.parametrize("often", [1, 3])
def test_the_last_reply_waits_when_memory_runs_out_and_loses_nothing(often: int) -> None:
    """At some times, passes with more than two texts fail."""
    target, rounds = toy_target(context_length=2048), 0
    honest = target.forward

    def full(rows: Rows, cache: KVCache, want: Want) -> Forward:
        nonlocal rounds
        rounds += 1
        if len(rows.slots) > 2 and rounds % often == 0:
            raise OutOfMemory("no memory", "Use less")
        return honest(rows, cache, want)

    target.forward = full  # type: ignore[method-assign]
    engine = Engine(target, Suffix())
    scheduler = Scheduler(engine, 5)
    how = Sampling(max_new_tokens=15, temperature=0.8, seed=5)
    prompts = [random.Random(i).choices(range(37), k=4 + i) for i in range(5)]
    tasks = [task(engine, prompt, how, engine.policies.default) for prompt in prompts]
    for one in tasks:
        scheduler.add(one)
    shown = finish(scheduler)
    assert [shown[one] for one in tasks] == [run(TOY, prompt, how)[0] for prompt in prompts]
    assert all(one.error is None for one in tasks)


def test_a_single_text_without_room_fails_with_the_cause() -> None:
    target = toy_target()

    def full(rows: Rows, cache: KVCache, want: Want) -> Forward:
        raise OutOfMemory("no memory", "Use less")

    target.forward = full  # type: ignore[method-assign]
    engine = Engine(target)
    scheduler = Scheduler(engine, 5)
    alone = task(engine, [1], Sampling(max_new_tokens=15))
    scheduler.add(alone)
    assert scheduler.turn() == [(alone, [])]
    assert isinstance(alone.error, OutOfMemory)
    assert not scheduler.busy


def test_nothing_is_kept_of_prompts_whose_samples_are_over() -> None:
    engine = Engine(TOY)
    scheduler = Scheduler(engine, 2)
    how = Sampling(max_new_tokens=3)
    for group in range(5):
        for cancelled in (False, group == 4):
            scheduler.add(task(engine, [1, 2, group], how, group=group, cancelled=cancelled))
    finish(scheduler)
    assert not scheduler._prefilled


class Forgets(DrafterWrapper):
    """Fails for one request after its round was verified."""

    def __init__(self, inner: Drafter, error: Exception) -> None:
        super().__init__(inner)
        self._error, self._bad = error, -1

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        if prompt[0] == 4:
            self._bad = slot
        super().admit(slot, prompt)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        if slot == self._bad:
            raise self._error
        super().observe(slot, verdict, out)


@pytest.mark.parametrize("error", [OutOfMemory("no memory", "Use less"), ValueError("somebody's own")])
def test_a_drafter_that_fails_after_a_round_loses_no_token_of_others(error: Exception) -> None:
    engine = Engine(TOY, Forgets(Suffix(), error), DraftBudget.chain(2))
    scheduler = Scheduler(engine, 4)
    how, drafted = Sampling(max_new_tokens=12), engine.policies.default
    good = [task(engine, prompt, how, drafted) for prompt in ([1, 2, 3], [9, 8])]
    bad = task(engine, [4, 5], how, drafted)
    for one in (good[0], bad, good[1]):
        scheduler.add(one)
    shown = finish(scheduler)
    assert bad.error is error
    assert [shown[one] for one in good] == [run(TOY, [1, 2, 3], how)[0], run(TOY, [9, 8], how)[0]]
    assert shown[bad] == run(TOY, [4, 5], how)[0][: len(shown[bad])]
    assert not any(engine.cache.lengths)


def reading(quota: int = 16, width: int = 8) -> tuple[Engine, Scheduler]:
    """Return an engine with a prefix cache, and a scheduler with a stopped clock, so that only the quota counts."""
    engine = Engine(TOY)
    engine.__dict__["chunk_invariant"] = True
    engine.remember(1 << 24)
    return engine, Scheduler(engine, width, quota, clock=lambda: 0.0)


def turns_until_read(scheduler: Scheduler, one: Task) -> int:
    for turn in range(1, 1000):
        scheduler.turn()
        if one in scheduler.running or one.done:
            return turn
    raise AssertionError("the prompt was never read")


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine, scheduler = reading()
    talk = task(engine, [1, 2], Sampling(max_new_tokens=400))
    long, short = task(engine, [5] * 900, Sampling(max_new_tokens=2)), task(engine, [6] * 9, Sampling(max_new_tokens=2))
    for one in (talk, long):
        scheduler.add(one)
        scheduler.turn()
    scheduler.add(short)
    assert turns_until_read(scheduler, short) == 1
    assert long.unread > 700


def test_a_sample_does_not_wait_for_a_long_prompt_if_another_sample_has_read_its_prompt() -> None:
    engine, scheduler = reading()
    scheduler.add(task(engine, [1, 2], Sampling(max_new_tokens=400)))
    long = task(engine, [5] * 400, Sampling(max_new_tokens=2))
    scheduler.add(long)
    scheduler.turn()
    one, other = (task(engine, [6] * 180, Sampling(max_new_tokens=90), group="samples") for _ in range(2))
    for sample in (one, other):
        scheduler.add(sample)
    turns_until_read(scheduler, one)
    assert 0 < long.unread < 2 * 180
    assert turns_until_read(scheduler, other) <= 1


def turns_in_a_crowd(engine: Engine, scheduler: Scheduler, one: Task) -> int:
    """Return the turns until a prompt is read, while more short prompts arrive than can be read."""
    turns = 0
    while one not in scheduler.running:
        for _ in range(2 - len(scheduler.waiting)):
            scheduler.add(task(engine, [turns % 37, 7, *[8] * 30], Sampling(max_new_tokens=1)))
        scheduler.turn()
        turns += 1
    return turns


def test_a_long_prompt_advances_while_short_ones_keep_coming() -> None:
    engine, scheduler = reading()
    scheduler.add(task(engine, [1, 2], Sampling(max_new_tokens=900)))
    long = task(engine, [5] * 900, Sampling(max_new_tokens=2))
    scheduler.add(long)
    turns = turns_in_a_crowd(engine, scheduler, long)
    assert 15 < turns < 230, "at least a quarter of the pieces"


def test_a_medium_prompt_advances_between_a_long_one_and_short_ones() -> None:
    engine, scheduler = reading()
    scheduler.add(task(engine, [1, 2], Sampling(max_new_tokens=900)))
    long = task(engine, [5] * 1500, Sampling(max_new_tokens=2))
    medium = task(engine, [6] * 100, Sampling(max_new_tokens=2), client="another")
    scheduler.add(long)
    scheduler.turn()
    scheduler.add(medium)
    turns = turns_in_a_crowd(engine, scheduler, medium)
    assert long.unread > 1000
    assert turns < 100


def test_few_prompts_are_partly_read_at_any_time() -> None:
    engine, scheduler = reading(quota=4)
    scheduler.add(task(engine, [1, 2], Sampling(max_new_tokens=2000)))
    scheduler.turn()
    lengths = (900, 800, 700, 440, 400, 219, 200, 108, 100, 90)
    tasks = [task(engine, [i] * count, Sampling(max_new_tokens=1)) for i, count in enumerate(lengths)]
    for one in tasks:
        scheduler.add(one)
    most = 0
    while scheduler.waiting or scheduler.reading:
        scheduler.turn()
        most = max(most, len(scheduler.reading))
    assert 2 <= most <= 5
    assert all(one.done and not one.error for one in tasks)


def test_a_prompt_whose_prefix_is_cached_counts_as_short() -> None:
    engine, scheduler = reading()
    known = [i % 37 for i in range(600)]
    scheduler.add(task(engine, known, Sampling(max_new_tokens=2)))
    finish(scheduler)
    scheduler.add(task(engine, [1, 2], Sampling(max_new_tokens=400)))
    scheduler.turn()
    long, again = (task(engine, prompt, Sampling(max_new_tokens=2)) for prompt in ([5] * 500, [*known, 1, 2]))
    scheduler.add(long)
    scheduler.turn()
    scheduler.add(again)
    assert again.unread < 5
    assert turns_until_read(scheduler, again) <= 2
    assert again.request
    assert again.request.stats.cached >= 599


@pytest.mark.parametrize("ending", ["cancelled", "late"])
def test_the_part_of_a_prompt_that_was_read_is_kept_when_its_client_leaves(ending: str) -> None:
    now = [0.0]
    engine, _ = reading()
    scheduler = Scheduler(engine, 8, 16, clock=lambda: now[0])
    prompt, how = [i * i % 37 for i in range(700)], Sampling(max_new_tokens=6)
    first = task(engine, prompt, how, deadline=10.0)
    scheduler.add(first)
    while first.unread > 300:
        scheduler.turn()
    first.cancelled = ending == "cancelled"
    now[0] = 20.0
    scheduler.turn()
    assert first.done
    second = task(engine, prompt, how)
    scheduler.add(second)
    assert second.unread <= 301
    assert finish(scheduler)[second] == run(TOY, prompt, how)[0]
    assert second.request
    assert second.request.stats.cached >= 399


def test_a_prompt_that_was_cut_off_resumes_in_whole_chunks_if_cuts_change_bits() -> None:
    engine, _ = reading()
    engine.__dict__["chunk_invariant"] = False
    engine.remember(1 << 24)
    scheduler = Scheduler(engine, 8, 16, clock=lambda: 0.0)
    prompt, how = [i * i % 37 for i in range(700)], Sampling(max_new_tokens=6)
    first, second = task(engine, prompt, how), task(engine, prompt, how)
    scheduler.add(first)
    scheduler.turn()
    first.cancelled = True
    scheduler.turn()
    scheduler.add(second)
    assert finish(scheduler)[second] == run(TOY, prompt, how)[0]
    assert second.request
    assert second.request.stats.cached == PREFILL_ROWS


def test_a_preempted_prompt_continues_where_it_was() -> None:
    engine, _ = reading()
    room = [10_000]
    scheduler = Scheduler(engine, 8, 16, lambda lengths: sum(lengths) <= room[0], lambda: 0.0)
    talk = task(engine, [1, 2], Sampling(max_new_tokens=30))
    long = task(engine, [5] * 400, Sampling(max_new_tokens=3))
    for one in (talk, long):
        scheduler.add(one)
    for _ in range(8):
        scheduler.turn()
    read = 399 - long.unread
    room[0] = 200
    scheduler.turn()
    assert long in scheduler.waiting
    room[0] = 10_000
    assert finish(scheduler)[long] == run(TOY, [5] * 400, Sampling(max_new_tokens=3))[0]
    assert read > 50
    assert long.request
    assert long.request.stats.cached == 0, "its own text is not a hit"
