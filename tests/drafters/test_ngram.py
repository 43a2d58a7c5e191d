from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters.ngram import NGram, _Index
from paceline.errors import InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget, Verdict
from tests.support.toys import ask_for


def ask(drafter: NGram, text: Sequence[int], budget: DraftBudget, slot: int = 0) -> Draft:
    (draft,) = drafter.propose([ask_for(slot, budget, Sampling(), text)])
    return draft


def drafted(text: Sequence[int], budget: int = 3, **options: int) -> tuple[int, ...]:
    drafter = NGram(**options)
    drafter.admit(0, text)
    return ask(drafter, text, DraftBudget.chain(budget)).tokens


def expected(text: Sequence[int], count: int, max_n: int, min_n: int) -> list[int]:
    """Search by definition: prefer the longest n-gram, and then its latest earlier occurrence."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[-n:]):
                size = count if n == max_n else min(count, max(3, 2 * n))
                longer = list(text)
                for i in range(size):
                    longer.append(longer[end + i])
                return longer[len(text) :]
    return []


def test_the_most_recent_match_wins() -> None:
    assert drafted([5, 1, 1, 1, 5, 2, 2, 2, 5]) == (2, 2, 2)


def test_a_longer_match_wins_over_a_more_recent_one() -> None:
    text = [8, 5, 1, 1, 1, 9, 5, 2, 2, 2, 8, 5]
    assert drafted(text) == (1, 1, 1)
    assert drafted(text, max_n=1) == (2, 2, 2)


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert drafted([1, 2, 3, 4]) == ()
    assert drafted([1]) == ()


def test_matches_shorter_than_min_n_are_ignored() -> None:
    text = [5, 1, 1, 6, 5]
    assert drafted(text, min_n=1) == (1, 1, 6)
    assert drafted(text, min_n=2) == ()


def test_a_repeating_text_fills_the_budget() -> None:
    assert drafted([9, *[1, 2, 3] * 3], budget=10) == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
    assert drafted([4] * 6, budget=10) == (4,) * 10


def test_a_short_match_earns_a_short_draft() -> None:
    far = list(range(10, 40))
    assert drafted([1, 2, *far, 3, 2], budget=15) == tuple(far[:3])
    assert drafted([1, 2, 3, *far, 0, 1, 2, 3], budget=15) == tuple(far[:6])
    assert drafted([1, 2, 3, 4, 5, *far, 1, 2, 3, 4, 5], budget=15) == tuple(far[:15])


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=40),
    count=st.integers(0, 9),
    max_n=st.integers(1, 5),
    min_n=st.integers(1, 5),
)
def test_round_by_round_it_says_what_a_search_says(
    text: list[int], cuts: list[int], count: int, max_n: int, min_n: int
) -> None:
    min_n = min(min_n, max_n)
    drafter = NGram(max_n, min_n)
    known = text[:1]
    drafter.admit(0, known)
    for cut in [*cuts, len(text)]:
        assert list(ask(drafter, known, DraftBudget.chain(count)).tokens) == expected(known, count, max_n, min_n)
        fresh = text[len(known) : len(known) + cut]
        known = known + fresh
        drafter.observe(0, Verdict(tuple(range(1, len(fresh))), tuple(fresh)), {})


@pytest.mark.parametrize("budget", [DraftBudget(4, 9, 3), DraftBudget(9, 4, 3), DraftBudget(4, 4)])
def test_it_drafts_a_chain_within_nodes_and_depth(budget: DraftBudget) -> None:
    drafter = NGram()
    drafter.admit(0, [1, 2] * 8)
    assert ask(drafter, [1, 2] * 8, budget) == Draft((1, 2, 1, 2), (0, 1, 2, 3))


def test_no_budget_no_draft() -> None:
    assert drafted([1, 1, 1, 1], budget=0) == ()


def test_large_token_ids_are_not_confused() -> None:
    high = 2**31 - 1
    assert drafted([high, 7, 7, 7, 0, 8, 8, 8, high]) == (7, 7, 7)
    assert drafted([0, 0, 5, 5, 5, 0, 6, 6, 6, 0, 0]) == (5, 5, 5)
    assert drafted([0, 5, 2**30 - 1, 2, 7, 7, 7, high, 0]) == (5, 2**30 - 1, 2)


def test_memory_is_bounded_in_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.ngram._MIN_INDEXED", 100)
    index = _Index([], 1, 5)
    for token in range(1000):
        index.text.append(token)
        index.catch_up()
        assert len(index.follows) + len(index.older) <= 2 * 100 * 5
    recent, forgotten = [*range(920, 924)], [*range(700, 704)]
    index.text += recent
    index.catch_up()
    assert index.lookup() == (4, 924)
    index.text += forgotten
    index.catch_up()
    assert index.lookup() == (0, 0)


def test_a_round_costs_the_same_in_a_long_text() -> None:
    """Count executed lines of Python, because time depends on the load of the machine."""

    def lines(n: int) -> int:
        drafter, text, count = NGram(), random.Random(0).choices(range(9), k=n), 0
        drafter.admit(0, text)
        ask(drafter, text, DraftBudget.chain(7))

        def trace(frame: FrameType, event: str, arg: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            drafter.observe(0, Verdict((), (1,)), {})
            ask(drafter, [1], DraftBudget.chain(7))
        finally:
            sys.settrace(before)
        return count

    assert lines(20000) < 2 * lines(500)


def test_slots_are_independent_and_can_be_used_again() -> None:
    drafter, budget = NGram(), DraftBudget.chain(2)
    drafter.admit(0, [1, 2, 3, 1])
    drafter.admit(1, [1, 5, 6, 1])
    asks = [ask_for(slot, budget, Sampling(), [1, 2, 3, 1]) for slot in (1, 0)]
    assert [d.tokens for d in drafter.propose(asks)] == [(5, 6), (2, 3)]
    drafter.release(0)
    drafter.release(0)
    drafter.admit(0, [1, 9, 4])
    assert ask(drafter, [1, 9, 4], budget).tokens == ()
    drafter.observe(0, Verdict((), (1,)), {})
    assert ask(drafter, [1, 9, 4, 1], budget).tokens == (9, 4)
    assert ask(drafter, [1, 5, 6, 1], budget, slot=1).tokens == (5, 6)


@pytest.mark.parametrize("options", [{"max_n": 0}, {"min_n": 0}, {"max_n": 2, "min_n": 3}, {"max_n": 65}])
def test_impossible_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidOption, match="min_n"):
        NGram(**options)
