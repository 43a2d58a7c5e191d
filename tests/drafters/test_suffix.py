from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.automaton import SuffixAutomaton
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget, Verdict
from paceline.verify.tree import check, depths
from tests.support.toys import ask_for

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)
BUDGETS = st.builds(DraftBudget, st.integers(0, 12), st.integers(0, 8), st.integers(1, 3))


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the positions where `part` ends in `text`."""
    n = len(part)
    return [i for i in range(n, len(text) + 1) if list(text[i - n : i]) == list(part)]


def longest_end(of: Sequence[int], text: Sequence[int], most: int) -> list[int]:
    """Return the longest suffix of `of`, with at most `most` tokens, that occurs in `text`."""
    sizes = range(min(len(of), most), -1, -1)
    return next(list(of[len(of) - n :]) for n in sizes if ends(text, of[len(of) - n :]))


def what_followed(text: Sequence[int], part: Sequence[int]) -> list[tuple[int, int]]:
    """Return (token, count), most recent first, by the definition of `followers`."""
    tokens = [text[i] for i in ends(text, part) if i < len(text)]
    return [(t, tokens.count(t)) for t in dict.fromkeys(reversed(tokens))]


def automaton(text: Sequence[int], limit: int = 1000) -> SuffixAutomaton:
    out = SuffixAutomaton(limit)
    for token in text:
        out.push(token)
    return out


def check_context(source: SuffixAutomaton) -> None:
    """Check that the context is the longest suffix that occurs earlier, and that its followers are correct."""
    state, length = source.context()
    context = longest_end(source.text, source.text[:-1], len(source.text) - 1)
    assert length == len(context)
    assert [t for t, _ in source.followers(state, 99)] == [t for t, _ in what_followed(source.text, context)]


# The automaton against brute force


@given(TEXTS)
def test_the_context_is_the_longest_repeated_end(text: list[int]) -> None:
    source = SuffixAutomaton()
    for token in text:
        source.push(token)
        check_context(source)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=16))
def test_every_shorter_context_knows_its_followers_and_their_counts(text: list[int]) -> None:
    source = automaton(text)
    state, length = source.context()
    while length:
        assert source.followers(state, 99) == what_followed(text, text[len(text) - length :])
        shorter, less = source.shorter(state)
        same = len(ends(text, text[len(text) - length :]))
        for n in range(less + 1, length + 1):
            assert len(ends(text, text[len(text) - n :])) == same
        assert len(ends(text, text[len(text) - less :])) > same
        state, length = shorter, less


def test_only_the_most_recent_followers_are_given() -> None:
    source = automaton([0, 1, 0, 2, 0, 1, 0, 3, 0])
    assert source.followers(source.context()[0], 2) == [(3, 1), (1, 2)]


@given(TEXTS, TEXTS, st.integers(1, 8))
def test_another_text_is_followed_while_the_automaton_grows(text: list[int], other: list[int], every: int) -> None:
    source, state, length = SuffixAutomaton(), 0, 0
    for i, token in enumerate(other):
        for fresh in text[i * every : (i + 1) * every]:
            source.push(fresh)
        state, length = source.settle(state, length)
        before = length
        state, length = source.step(state, length, token)
        match = longest_end(other[: i + 1], source.text, before + 1)
        assert length == len(match)
        assert [t for t, _ in source.followers(state, 99)] == [t for t, _ in what_followed(source.text, match)]


@given(TEXTS, st.integers(2, 9))
def test_starting_over_keeps_the_latest_tokens_and_all_promises(text: list[int], limit: int) -> None:
    source = SuffixAutomaton(limit)
    for i, token in enumerate(text):
        source.push(token)
        assert source.text == text[: i + 1][-len(source.text) :]
        assert min(i + 1, limit // 2) <= len(source.text) <= limit
        check_context(source)
    assert source.generation == 0 if len(text) <= limit else source.generation > 0


@given(TEXTS, TEXTS, st.integers(2, 9))
def test_extend_is_many_pushes_but_forgets_no_more_than_it_must(first: list[int], then: list[int], limit: int) -> None:
    source = automaton(first, limit)
    source.extend(then)
    if len(then) > limit:
        assert source.text == then[-limit:]
    else:
        assert source.text == automaton(first + then, limit).text
    check_context(source)


# Cost


def test_memory_stays_bounded_over_50_000_tokens() -> None:
    limit, rng = 2000, random.Random(0)
    source = SuffixAutomaton(limit)
    for _ in range(50):
        source.extend([rng.randrange(6) for _ in range(1000)])
        assert source.states <= 2 * limit
        assert len(source.text) <= limit
    assert source.generation == 48


def test_starting_over_takes_no_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    source, grown, steps = SuffixAutomaton(4096), 0, list[int]()
    honest = SuffixAutomaton._grow

    def grow(self: SuffixAutomaton, token: int) -> None:
        nonlocal grown
        grown += 1
        honest(self, token)

    monkeypatch.setattr(SuffixAutomaton, "_grow", grow)
    for token in range(10_000):
        before = grown
        source.push(token % 7)
        steps.append(grown - before)
    assert source.generation == 3
    assert max(steps) <= 6  # half of the limit would be 2,048


def test_a_very_long_request_is_bounded_too() -> None:
    drafter, rng = Suffix(remember=True, limit=64), random.Random(0)
    text = [0]
    drafter.admit(0, text)
    for _ in range(100):
        fresh = tuple(rng.randrange(3) for _ in range(50))
        propose(drafter, text, DraftBudget.chain(2))
        drafter.observe(0, Verdict((), fresh), {})
    state = drafter._slots[0]
    assert state.automaton.states <= 128
    assert state.reply is not None
    assert len(state.reply) <= 64


def lines_run(work: Callable[[], None]) -> int:
    """Return the number of executed lines of Python, which does not depend on the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [0] * n,
        lambda n: [0] * (n // 2) + [1] * (n // 2),
        lambda n: [0, 1] * (n // 2),
        fibonacci,
        lambda n: random.Random(0).choices(range(2), k=n),
        lambda n: random.Random(0).choices(range(500), k=n),
    ],
    ids=["same", "halves", "period", "fibonacci", "binary", "wide"],
)
def test_work_per_token_does_not_grow_with_the_text(make: Callable[[int], list[int]]) -> None:
    def per_token(n: int) -> float:
        return lines_run(lambda: SuffixAutomaton(1 << 20).extend(make(n))) / n

    assert per_token(4000) < 1.3 * per_token(500) + 5
    source = automaton(make(4000), 1 << 20)
    assert source.states <= 8000
    # Copying a state's transitions is one line of Python, so count the copies themselves, which still exist.
    assert sum(len(source.followers(s, 4000)) for s in range(source.states)) <= 12000


@pytest.mark.parametrize("remember", [False, True])
def test_a_round_costs_the_same_in_a_long_text(remember: bool) -> None:
    def round_lines(n: int) -> float:
        text = random.Random(1).choices(range(8), k=n + 40)
        drafter = Suffix(remember)
        if remember:
            finish(drafter, [0], text[:n])
        drafter.admit(0, text[:n])
        propose(drafter, text[:n], DraftBudget(15, 15, 3))
        lines = 0
        for i in range(n, n + 40):
            lines += lines_run(lambda: drafter.observe(0, Verdict((), (text[i],)), {}))  # noqa: B023
            lines += lines_run(lambda: check(propose(drafter, text[: i + 1], DraftBudget(15, 15, 3))))  # noqa: B023
        return lines / 40

    assert round_lines(6000) < 2 * round_lines(300)


# The drafter


def propose(drafter: Suffix, text: Sequence[int], budget: DraftBudget, slot: int = 0) -> Draft:
    (draft,) = drafter.propose([ask_for(slot, budget, Sampling(), text)])
    return draft


def drafted(text: Sequence[int], budget: DraftBudget, floor: float = 0.0) -> Draft:
    drafter = Suffix(floor=floor)
    drafter.admit(0, text)
    return propose(drafter, text, budget)


def finish(drafter: Suffix, prompt: Sequence[int], reply: Sequence[int], slot: int = 7) -> None:
    """Run one whole request."""
    drafter.admit(slot, prompt)
    drafter.observe(slot, Verdict(tuple(range(1, len(reply))), tuple(reply)), {})
    drafter.release(slot)


def test_the_longest_match_speaks_first() -> None:
    text = [8, 5, 1, 1, 9, 5, 2, 2, 7, 5, 2, 2, 8, 5]
    assert drafted(text, DraftBudget.chain(2)).tokens == (1, 1)


def test_frequency_counts_and_recency_breaks_ties() -> None:
    assert drafted([5, 1, 5, 1, 5, 2, 6, 5], DraftBudget.chain(1)).tokens == (1,)
    assert drafted([5, 1, 4, 5, 2, 6, 5], DraftBudget.chain(1)).tokens == (2,)


def test_siblings_come_likeliest_first() -> None:
    text = [5, 1, 5, 1, 5, 1, 5, 2, 5, 2, 5, 3, 6, 5]
    draft = drafted(text, DraftBudget(3, 1, 3))
    assert draft == Draft((1, 2, 3), (0, 0, 0))
    assert drafted(text, DraftBudget(3, 1, 2)).tokens == (1, 2)


def test_a_shorter_context_adds_a_branch() -> None:
    text = [8, 5, 1, 9, 5, 2, 9, 8, 5]
    assert set(drafted(text, DraftBudget(2, 1, 2)).tokens) == {1, 2}


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert drafted([1, 2, 3, 4], DraftBudget(8, 4, 3)) == Draft()
    assert drafted([1], DraftBudget(8, 4, 3)) == Draft()


def test_a_repeating_text_fills_the_budget() -> None:
    assert drafted([9, *[1, 2, 3] * 3], DraftBudget.chain(10), floor=0.2).tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
    assert drafted([4] * 9, DraftBudget.chain(12), floor=0.2).tokens == (4,) * 12


def test_a_weak_match_gets_a_short_draft() -> None:
    far = list(range(10, 40))
    weak = drafted([1, 2, *far, 3, 2], DraftBudget.chain(15), floor=0.2)
    strong = drafted([*range(1, 9), *far, *range(1, 9)], DraftBudget.chain(15), floor=0.2)
    assert weak.tokens == tuple(far[:3])
    assert strong.tokens == tuple(far[: len(strong.tokens)])
    assert len(strong.tokens) >= 8


@given(TEXTS, st.lists(st.tuples(st.integers(1, 9), BUDGETS), max_size=12), st.sampled_from([0.0, 0.2]))
def test_every_draft_is_a_tree_within_budget_of_things_that_occurred(
    text: list[int], rounds: list[tuple[int, DraftBudget]], floor: float
) -> None:
    drafter = Suffix(floor=floor, limit=24)
    known = text[:1]
    drafter.admit(0, known)
    for count, budget in rounds:
        draft = propose(drafter, known, budget)
        check(draft)
        deep = depths(draft.parents)
        assert len(draft.tokens) <= budget.nodes
        assert max(deep) <= budget.depth
        assert max((draft.parents.count(p) for p in draft.parents), default=0) <= budget.branch
        rows = [known[-1], *draft.tokens]
        pairs = set(pairwise(known))
        assert {(rows[p], t) for p, t in zip(draft.parents, draft.tokens, strict=True)} <= pairs
        fresh = text[len(known) : len(known) + count]
        known = known + fresh
        drafter.observe(0, Verdict(tuple(range(1, len(fresh))), tuple(fresh)), {})


@given(st.lists(st.integers(0, 3), min_size=12, max_size=60))
def test_a_tree_grows_best_first(text: list[int]) -> None:
    """The draft for a smaller budget is a prefix of the draft for a larger budget."""
    whole = drafted(text, DraftBudget(12, 6, 3))
    for nodes in range(len(whole.tokens)):
        part = drafted(text, DraftBudget(nodes, 6, 3))
        assert (part.tokens, part.parents) == (whole.tokens[:nodes], whole.parents[:nodes])


def test_the_cost_of_a_row_decides_how_likely_a_node_must_be() -> None:
    """With other requests, rows have a cost. If a row costs nearly a token, only nearly certain tokens are drafted.

    If a text follows its drafts, other requests change nothing.
    """
    drafter = Suffix()
    asks = []
    for slot in range(4):
        drafter.admit(slot, [1, 2, 3, 1])
        asks.append(ask_for(slot, DraftBudget.chain(3), Sampling(), [1, 2, 3, 1]))
    (alone,) = drafter.propose(asks[:1])
    assert len(alone.tokens) == 3
    assert all(len(draft.tokens) < 3 for draft in drafter.propose(asks))
    assert all(not draft.tokens for draft in drafter.propose([replace(ask, price=0.95) for ask in asks]))
    drawing = Sampling(temperature=1.0, rule="rejection").sampler()
    drawn = [replace(ask, sampler=drawing) for ask in asks]
    assert drafter.propose(drawn) == [alone] * 4


def test_slots_are_independent_and_can_be_used_again() -> None:
    drafter, budget = Suffix(floor=0.0), DraftBudget.chain(2)
    drafter.admit(0, [1, 2, 3, 1])
    drafter.admit(1, [1, 5, 6, 1])
    asks = [ask_for(slot, budget, Sampling(), [1, 2, 3, 1]) for slot in (1, 0)]
    assert [d.tokens for d in drafter.propose(asks)] == [(5, 6), (2, 3)]
    drafter.release(0)
    drafter.release(0)
    drafter.admit(0, [1, 9, 4])
    assert propose(drafter, [1, 9, 4], budget).tokens == ()
    drafter.observe(0, Verdict((), (1,)), {})
    assert propose(drafter, [1, 9, 4, 1], budget).tokens == (9, 4)
    assert propose(drafter, [1, 5, 6, 1], budget, slot=1).tokens == (5, 6)


# Earlier requests


@pytest.mark.parametrize(("remember", "tokens"), [(True, (5, 6, 7)), (False, ())])
def test_earlier_replies_are_drafted_only_on_request(remember: bool, tokens: tuple[int, ...]) -> None:
    drafter = Suffix(remember)
    finish(drafter, [1, 2], [3, 4, 5, 6, 7])
    drafter.admit(0, [9, 3, 4])
    assert propose(drafter, [9, 3, 4], DraftBudget.chain(3)).tokens == tokens


def test_a_reply_is_remembered_from_the_token_before_it_but_not_the_prompt() -> None:
    drafter = Suffix(remember=True)
    finish(drafter, [10, 11, 12], [13, 14])
    drafter.admit(0, [10])
    assert propose(drafter, [10], DraftBudget.chain(2)).tokens == ()
    drafter.observe(0, Verdict((), (12,)), {})
    assert propose(drafter, [10, 12], DraftBudget.chain(2)).tokens == (13, 14)


def test_a_request_that_ends_at_once_leaves_nothing_behind() -> None:
    drafter = Suffix(remember=True)
    drafter.admit(3, [1, 2, 3])
    drafter.release(3)
    drafter.admit(3, [1, 2])
    assert propose(drafter, [1, 2], DraftBudget.chain(2), slot=3) == Draft()


def test_no_draft_crosses_from_one_reply_into_the_next() -> None:
    drafter = Suffix(remember=True, floor=0.0)
    finish(drafter, [1], [2, 3])
    finish(drafter, [1], [2, 3])
    drafter.admit(0, [1, 2])
    assert propose(drafter, [1, 2], DraftBudget(9, 9, 3)) == Draft((3,), (0,))


def test_the_longer_match_wins_between_text_and_memory() -> None:
    own, budget = [3, 8, 4, 3], DraftBudget.chain(1)
    drafter = Suffix(remember=True)
    finish(drafter, [1], [4, 3, 9])
    drafter.admit(0, own)
    assert propose(drafter, own, budget).tokens == (9,)
    drafter = Suffix(remember=True)
    finish(drafter, [1], [7, 3, 9])
    drafter.admit(0, own)
    assert propose(drafter, own, budget).tokens == (8,)


def test_a_running_request_sees_what_another_finishes() -> None:
    drafter, text = Suffix(remember=True), [1, 8, 9]
    drafter.admit(0, text)
    assert propose(drafter, text, DraftBudget.chain(2)).tokens == ()
    finish(drafter, [1], [2, 3, 4, 5])
    drafter.observe(0, Verdict((), (2,)), {})
    assert propose(drafter, [*text, 2], DraftBudget.chain(3)).tokens == (3, 4, 5)


def test_a_waiting_request_sees_what_another_says_of_its_context() -> None:
    drafter, text = Suffix(remember=True), [9, 21]
    finish(drafter, [1], [20, 21, 22])
    drafter.admit(0, text)
    assert propose(drafter, text, DraftBudget.chain(1)).tokens == (22,)
    finish(drafter, [1], [30, 21, 23])
    assert propose(drafter, text, DraftBudget.chain(1)).tokens == (23,)


@pytest.mark.parametrize("remember", [False, True])
def test_nothing_of_a_finished_request_stays_but_what_is_remembered(remember: bool) -> None:
    drafter = Suffix(remember)
    finish(drafter, [1, 2, 3], [4, 5])
    assert drafter._slots == {}
    assert [list(reply) for reply in drafter._finished] == ([[3, 4, 5]] if remember else [])


def test_the_memory_forgets_the_oldest_text_and_running_requests_find_their_position_again() -> None:
    drafter = Suffix(remember=True, limit=16)
    drafter.admit(0, [50])
    finish(drafter, [1], [2, 3, 4])
    assert propose(drafter, [50], DraftBudget.chain(2)).tokens == ()
    drafter.observe(0, Verdict((), (2, 3)), {})
    assert propose(drafter, [50, 2, 3], DraftBudget.chain(1)).tokens == (4,)
    for first in range(100, 160, 10):
        finish(drafter, [1], list(range(first, first + 6)))
    assert propose(drafter, [50, 2, 3], DraftBudget.chain(1)).tokens == ()
    drafter.observe(0, Verdict((), (152, 153)), {})
    assert propose(drafter, [50, 2, 3, 152, 153], DraftBudget.chain(2)).tokens == (154, 155)
    for first in range(200, 230, 10):
        finish(drafter, [1], [152, 153, first])
    assert propose(drafter, [50, 2, 3, 152, 153], DraftBudget.chain(1)).tokens == (220,)


@pytest.mark.parametrize("options", [{"limit": 1}, {"floor": -0.1}, {"floor": 1.5}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidOption, match="limit"):
        Suffix(**options)  # type: ignore[arg-type]
