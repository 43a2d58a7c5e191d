from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.layout import ancestors, layout
from paceline.types import Draft
from tests.test_tree import drafts, path_to


@given(drafts(most=20), st.integers(0, 3), st.integers(0, 1))
def test_ancestors_lie_in_order_and_in_the_pairs_of_plain_decoding(draft: Draft, padding: int, length: int) -> None:
    rows = len(draft.tokens) + 1
    laid = layout((-1, *draft.parents, *[-1] * padding), length)
    for row in range(rows):
        path = path_to(draft, row)[::-1]
        columns = laid.visible[row].nonzero()[:, 0].tolist()
        assert [laid.sources[c] for c in columns] == path, "the path, each row once, in order"
        assert columns[-1] == laid.home[row]
        for depth, column in enumerate(columns):
            place, position = length + column, length + depth
            assert place % 2 == position % 2, "first and second of a pair stay so"
            if depth and position % 2:
                assert columns[depth - 1] == column - 1, "a pair stays together"
    for row in range(rows, rows + padding):
        assert laid.visible[row].nonzero()[:, 0].tolist() == [laid.home[row]]
    assert len(laid.sources) <= 2 * (rows + padding) + 1
    assert laid.home[0] == 0


@pytest.mark.parametrize("parents", [(-1,), (-1, -1), (-1, 0), (-1, 0, 1, 2, 3), (-1, -1, -1)])
def test_chains_and_padding_lie_as_they_come(parents: tuple[int, ...]) -> None:
    for length in (0, 1):
        assert layout(parents, length).sources == tuple(range(len(parents)))


@given(drafts())
def test_ancestors(draft: Draft) -> None:
    mask = ancestors((-1, *draft.parents))
    for row in range(len(draft.tokens) + 1):
        assert mask[row].nonzero()[:, 0].tolist() == sorted(path_to(draft, row))
