"""Columns of a tree's rows in the cache while they are verified.

A sum of floats depends on its order, and a bfloat16 product adds keys in pairs of neighbouring columns (2i, 2i + 1).
For a row's result to have the bits of plain decoding, its ancestors must lie in the order of their positions and in the
same pairs. What lies between does not matter: it weighs zero, and adding zero changes nothing. A chain satisfies this
as it is. In a tree, a row at an even position is the first of a pair and each of its children the second; every child
after the first gets a copy of its parent beside it. Firsts begin at even columns, children or not, so that a row's
column depends on the rows before it alone: a tree may grow over several passes, and every row keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

NONE = -1
"""The parent of a row that continues the committed prefix directly."""


@dataclass(frozen=True, slots=True)
class Layout:
    """C columns after the committed prefix.

    `rows[c]`: the row whose keys and values column c holds. `columns[r]`: the column where row r itself lies.
    `visible`: bool [T, C], the columns that each row of the pass attends to. `row_depths` and `column_depths`, int32
    [T] and [C]: distance from the prefix of the pass's rows, and of the rows in the columns. What the pass writes, all
    but columns that hold the same already: `stores`, int32 [n, 2], columns and the rows of the pass that they get, and
    `copies`, int32 [m, 2], columns and those, written by earlier passes, of which they get copies first.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    visible: Tensor
    row_depths: Tensor
    column_depths: Tensor
    stores: Tensor
    copies: Tensor

    def mutual(self) -> Layout:
        """The same columns, where every row sees every row."""
        return replace(self, visible=torch.ones_like(self.visible))


@lru_cache(maxsize=256)
def layout(parents: tuple[int, ...], length: int, start: int = 0) -> Layout:
    """Layout of rows with these parents (`NONE`: no row of this tree) after a prefix of `length` tokens, for a pass
    over the rows from `start` on.

    Only the parity of `length` matters: pass `length % 2`.
    """
    whole = _layout(parents, length % 2, start)
    if not start:
        return whole
    held = _layout(parents[:start], length % 2, start).rows
    written = [(c, row) for c, row in enumerate(whole.rows) if c >= len(held) or held[c] != row]
    return replace(
        whole,
        visible=whole.visible[start:],
        row_depths=whole.row_depths[start:],
        stores=_pairs((c, row - start) for c, row in written if row >= start),
        copies=_pairs((c, whole.columns[row]) for c, row in written if row < start),
    )


@lru_cache(maxsize=64)
def nothing(count: int) -> Layout:
    """Layout of `count` rows that see the prefix alone, and are not written."""
    depths = torch.zeros(count, dtype=torch.int32)
    return Layout((), (), torch.zeros(count, 1, dtype=torch.bool), depths, depths[:1], _pairs(()), _pairs(()))


def _layout(parents: tuple[int, ...], parity: int, start: int) -> Layout:
    """Layout of all rows, those of earlier passes too."""
    numbers = tuple(range(len(parents)))
    if parents[1:] == numbers[:-1]:
        rows, columns, visible = numbers, numbers, torch.ones(len(numbers), len(numbers), dtype=torch.bool).tril_()
    # A tree to verify has one root. Where earlier passes fed several, it only drafts, and its rows lie in order.
    elif NONE in parents[1:start]:
        rows, columns, visible = numbers, numbers, ancestors(parents)
    else:
        rows, columns, visible = _paired(parents, parity)
    row_depths = torch.tensor(depths(parents), dtype=torch.int32)
    return Layout(rows, columns, visible, row_depths, row_depths[list(rows)], _pairs(enumerate(rows)), _pairs(()))


def _pairs(pairs: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(pairs), dtype=torch.int32).view(-1, 2)


def depths(parents: Sequence[int]) -> list[int]:
    """Number of rows of this tree between each row and the committed prefix."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent == NONE else out[parent] + 1)
    return out


def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Mask, bool [T, T]: row r sees itself and its ancestors, every row in the column of its own number."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent != NONE:
            visible[row] |= visible[parent]
    return visible


def _paired(parents: tuple[int, ...], parity: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """`rows`, `columns` and `visible`: rows in order, each beside its parent if it is the second of a pair and that
    column is free."""
    rows: list[int] = []
    paths: list[list[int]] = []
    beside: dict[int, int] = {}
    """The column kept free beside a first of a pair, until its first child comes."""

    def place(row: int) -> int:
        rows.append(row)
        return len(rows) - 1

    def align() -> None:
        if (parity + len(rows)) % 2:
            place(0)

    for row, parent in enumerate(parents):
        above = paths[parent] if parent != NONE else []
        first = (parity + len(above)) % 2 == 0
        if first or parent == NONE:
            if first and parent != NONE:
                align()
            paths.append([*above, place(row)])
            if first and row in parents:
                beside[row] = place(row)
        elif parent in beside:
            column = beside.pop(parent)
            rows[column] = row
            paths.append([*above, column])
        else:
            align()
            paths.append([*above[:-1], place(parent), place(row)])
    visible = torch.zeros(len(parents), len(rows), dtype=torch.bool)
    for seen, path in zip(visible, paths, strict=True):
        seen[path] = True
    return tuple(rows), tuple(path[-1] for path in paths), visible
