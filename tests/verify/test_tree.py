from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import MIN_ROWS, Place, check, depths, from_paths, pack, places, renumber_siblings, shape
from tests.support.trees import drafts, path_to

CPU = torch.device("cpu")


@given(drafts())
def test_depth_is_the_length_of_the_path(draft: Draft) -> None:
    rows = len(draft.tokens) + 1
    assert depths(draft.parents) == [len(path_to(draft, row)) - 1 for row in range(rows)]


@given(st.lists(drafts(), min_size=1, max_size=4))
def test_pack_pads_to_the_longest_and_never_below_four_in_all(batch: list[Draft]) -> None:
    lengths = [10 * (i + 1) for i in range(len(batch))]
    rows = pack([99] * len(batch), batch, range(len(batch)), lengths, CPU)
    count = max(-(-MIN_ROWS // len(batch)), 1 + max(len(d.tokens) for d in batch))
    assert rows.tokens.shape == rows.positions.shape == (len(batch), count)
    assert rows.counts == tuple(1 + len(draft.tokens) for draft in batch)
    real = [(i, row) for i, n in enumerate(rows.counts) for row in range(n)]
    assert [divmod(line, count) for line in rows.lines] == real
    for i, draft in enumerate(batch):
        real = len(draft.tokens) + 1
        assert rows.tokens[i, :real].tolist() == [99, *draft.tokens]
        assert rows.tokens[i, real:].tolist() == [99] * (count - real)
        assert rows.positions[i, :real].tolist() == [lengths[i] + d for d in depths(draft.parents)]
        assert rows.parents[i] == (-1, *draft.parents, *[-1] * (count - real))


@given(drafts())
def test_from_paths_rebuilds_a_tree_from_its_paths(draft: Draft) -> None:
    def tokens(row: int) -> tuple[int, ...]:
        return tuple(draft.tokens[r - 1] for r in reversed(path_to(draft, row)[:-1]))

    paths = [tokens(row) for row in range(1, len(draft.tokens) + 1)]
    rebuilt = from_paths(paths)
    check(rebuilt)
    assert rebuilt == draft


@given(drafts())
def test_every_valid_draft_passes_the_check(draft: Draft) -> None:
    check(draft)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((1, 2), (0,)), ((1,), (1,)), ((1, 2), (0, 2)), ((1, 1), (0, 0)), ((1,), (-1,))],
)
def test_the_check_refuses_invalid_trees(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOption):
        check(Draft(tokens, parents))


def test_budgets_shrink_to_what_can_be_used() -> None:
    assert DraftBudget.chain(5).within(3) == DraftBudget.chain(3)
    assert DraftBudget.chain(5).within(9) == DraftBudget.chain(5)
    assert DraftBudget(16, 6, 3).within(2) == DraftBudget(16, 2, 3)
    assert DraftBudget(16, 6, 3).within(0).nodes == 0
    assert DraftBudget.chain(5).within(-1) == DraftBudget.chain(0)
    assert DraftBudget.chain(5).within(9, 3) == DraftBudget.chain(3)
    assert DraftBudget(16, 6, 3).within(9, 4) == DraftBudget(4, 4, 3)
    assert DraftBudget(16, 6, 3).within(2, 1) == DraftBudget(1, 1, 3)
    for wrong in ((-1, 1, 1), (1, -1, 1), (1, 1, 0), (513, 9, 2)):
        with pytest.raises(InvalidOption):
            DraftBudget(*wrong)


@given(st.integers(0, 40), st.integers(0, 8), st.integers(1, 5))
def test_a_fixed_shape_is_a_tree_within_its_budget(nodes: int, depth: int, branch: int) -> None:
    wide = shape(DraftBudget(nodes, depth, branch))
    places = {(*parent, rank) for parent, count in wide.items() for rank in range(count)}
    assert len(places) == min(nodes, sum(branch**d for d in range(1, depth + 1)))
    assert all(parent in places or parent == () for parent in wide), "children hang on places"
    assert max((len(place) for place in places), default=0) <= depth
    assert max(wide.values(), default=0) <= branch


def test_a_fixed_shape_is_widest_at_the_most_likely_nodes() -> None:
    assert shape(DraftBudget.chain(4)) == {(): 1, (0,): 1, (0, 0): 1, (0, 0, 0): 1}
    wide = shape(DraftBudget(16, 5, 3))
    assert wide[()] >= wide[(0,)] >= wide[(0, 0)] >= wide[(0, 0, 0)]
    assert wide[(0,)] > wide.get((1,), 0)
    assert (0, 0, 0, 0) in wide, "the first path goes all the way"


ORDERS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=20)


@given(ORDERS, st.integers(0, 12), st.integers(0, 4), st.integers(1, 4))
def test_an_order_is_cut_to_a_tree_within_its_budget(order: list[Place], nodes: int, depth: int, branch: int) -> None:
    kept = places(DraftBudget(nodes, depth, branch), tuple(order))
    assert len(set(kept)) == len(kept) <= nodes
    assert all(place[:-1] in ((), *kept[:i]) for i, place in enumerate(kept)), "a place comes after the one above it"
    assert all(len(place) <= depth and max(place) < branch for place in kept)
    fitting = {place for place in order if len(place) <= depth and max(place) < branch}
    assert len(kept) == nodes or fitting <= set(kept), "nothing is left out as long as there is room"


@given(ORDERS)
def test_closing_gaps_keeps_the_tree_and_numbers_its_siblings(order: list[Place]) -> None:
    kept = places(DraftBudget(30, 4, 4), tuple(order))
    closed = renumber_siblings(kept)
    assert from_paths(closed).parents == from_paths(kept).parents
    assert all(place[-1] == 0 or (*place[:-1], place[-1] - 1) in closed for place in closed)


def test_the_first_of_an_order_stay() -> None:
    order = ((0,), (1,), (0, 2), (1, 0, 0), (2,))
    assert places(DraftBudget(3, 3, 3), order) == ((0,), (1,), (0, 2))
    assert places(DraftBudget(9, 3, 3), order) == ((0,), (1,), (0, 2), (1, 0), (1, 0, 0), (2,))
    assert renumber_siblings(places(DraftBudget(9, 3, 3), order))[2] == (0, 0)
    assert places(DraftBudget(9, 3, 1), order) == ((0,),)
