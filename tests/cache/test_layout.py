from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.layout import ancestors, layout
from paceline.types import Draft
from tests.support.trees import drafts, path_to


@given(drafts(most=20), st.integers(0, 3), st.integers(0, 1))
def test_ancestors_have_the_order_and_pairs_of_plain_decoding(draft: Draft, padding: int, length: int) -> None:
    rows = len(draft.tokens) + 1
    laid = layout((-1, *draft.parents, *[-1] * padding), length)
    for row in range(rows):
        path = path_to(draft, row)[::-1]
        columns = laid.visible[row].nonzero()[:, 0].tolist()
        assert [laid.rows[c] for c in columns] == path, "the path, each row once, in order"
        assert columns[-1] == laid.columns[row]
        assert laid.row_depths[row] == len(path) - 1
        for depth, column in enumerate(columns):
            place, position = length + column, length + depth
            assert place % 2 == position % 2, "first and second of a pair stay so"
            if depth and position % 2:
                assert columns[depth - 1] == column - 1, "a pair stays together"
    for row in range(rows, rows + padding):
        assert laid.visible[row].nonzero()[:, 0].tolist() == [laid.columns[row]]
    assert len(laid.rows) <= 2 * (rows + padding) + 1
    assert laid.columns[0] == 0
    assert laid.column_depths.tolist() == [laid.row_depths[row] for row in laid.rows]


@given(drafts(most=12), st.integers(0, 3), st.integers(0, 1), st.data())
def test_rows_lie_where_they_lay_when_the_tree_was_smaller(
    draft: Draft, fillers: int, length: int, data: st.DataObject
) -> None:
    """A tree can be fed in any number of passes, each with padding rows. The slab must then have the tree's layout."""
    parents = (-1, *draft.parents)
    cuts = sorted({0, len(parents), *data.draw(st.lists(st.integers(1, len(parents)), max_size=4))})
    slab: dict[int, int] = {}
    for start, end in itertools.pairwise(cuts):
        count = data.draw(st.integers(0, fillers))
        laid = layout((*parents[:end], *[-1] * count), length, start)
        held = {row: slab.get(laid.columns[row]) for row in range(start)}
        assert held == {row: row for row in range(start)}, "where a copy is taken from, and what is seen"
        slab |= {column: slab[source] for column, source in laid.copies.tolist()}
        slab |= {column: start + row for column, row in laid.stores.tolist()}
        assert laid.visible.shape == (end + count - start, len(laid.rows))
    whole = layout(parents, length)
    assert [slab[column] for column in whole.visible.any(0).nonzero()[:, 0].tolist()] == [
        whole.rows[column] for column in whole.visible.any(0).nonzero()[:, 0].tolist()
    ]
    assert torch.equal(layout(parents, length, len(parents) - 1).visible[0], whole.visible[-1])


@pytest.mark.parametrize("parents", [(-1,), (-1, -1), (-1, 0), (-1, 0, 1, 2, 3), (-1, -1, -1)])
def test_chains_and_padding_keep_their_order(parents: tuple[int, ...]) -> None:
    for length in (0, 1):
        assert layout(parents, length).rows == tuple(range(len(parents)))


@given(drafts())
def test_ancestors(draft: Draft) -> None:
    mask = ancestors((-1, *draft.parents))
    for row in range(len(draft.tokens) + 1):
        assert mask[row].nonzero()[:, 0].tolist() == sorted(path_to(draft, row))
