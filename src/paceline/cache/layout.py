"""Placement of a draft tree's rows in the columns of the KV cache while the tree is verified.

The result of a floating-point sum depends on its order, and a bfloat16 matrix multiplication sums over the columns in
pairs of neighbours (2i, 2i + 1). To get the same bits as plain decoding, a row's ancestors must be stored in the order
of their positions and in the same pairs as in plain decoding. Other columns may lie in between, because their weight is
zero and adding zero changes nothing.

A chain stored in order meets this condition. In a tree, a row at an even position is the first of a pair, and each of
its children is the second of a pair with it. The first child takes the column after its parent. Every other child gets
a pair of its own, with a copy of the parent in the first column. The first row of a pair always takes an even column,
even if it has no child yet. A row's column therefore depends only on earlier rows. So a tree can grow over several
passes, and every row keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

NONE = -1
"""The parent of a row that directly continues the committed prefix."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The C columns after the committed prefix, for a pass of T rows.

    The pass writes only `stores` and `copies`, which omit columns that already hold the right row.

    Attributes:
        rows: For each column, the row whose keys and values it holds.
        columns: For each row, the column that it is written to. Copies of a row are not included.
        visible: The columns that each row of the pass attends to, bool [T, C].
        row_depths: Distance of each row of the pass from the prefix, int32 [T].
        column_depths: Distance of each column's row from the prefix, int32 [C].
        stores: Pairs of a column and the row of the pass that is written to it, int32 [n, 2].
        copies: Pairs of a column and the column, written by an earlier pass, that is copied to it, int32 [m, 2]. Copies
            are made before stores.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    visible: Tensor
    row_depths: Tensor
    column_depths: Tensor
    stores: Tensor
    copies: Tensor

    def mutual(self) -> Layout:
        """Return a copy of this layout that lets every row attend to all columns."""
        return replace(self, visible=torch.ones_like(self.visible))


@lru_cache(maxsize=256)
def layout(parents: tuple[int, ...], length: int, start: int = 0) -> Layout:
    """Return the layout for a pass over the new rows of a tree.

    Args:
        parents: The parent of every row of the tree: the index of a row, or `NONE`.
        length: Number of tokens in the committed prefix. Only its parity matters, so pass `length % 2` to share cached
            layouts.
        start: The first new row. The rows before it were written by earlier passes.
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
def prefix_only_layout(count: int) -> Layout:
    """Return the layout of `count` rows that attend only to the prefix and are not written."""
    depths = torch.zeros(count, dtype=torch.int32)
    return Layout((), (), torch.zeros(count, 1, dtype=torch.bool), depths, depths[:1], _pairs(()), _pairs(()))


def _layout(parents: tuple[int, ...], parity: int, start: int) -> Layout:
    """Return the layout of all rows, including the rows of earlier passes."""
    numbers = tuple(range(len(parents)))
    if parents[1:] == numbers[:-1]:
        rows, columns, visible = numbers, numbers, torch.ones(len(numbers), len(numbers), dtype=torch.bool).tril_()
    # A tree that is verified has one root. If earlier passes fed several roots, the tree is only used for drafting. The
    # bits do not matter then, so the rows are simply stored in order.
    elif NONE in parents[1:start]:
        rows, columns, visible = numbers, numbers, ancestors(parents)
    else:
        rows, columns, visible = _place_in_pairs(parents, parity)
    row_depths = torch.tensor(depths(parents), dtype=torch.int32)
    return Layout(rows, columns, visible, row_depths, row_depths[list(rows)], _pairs(enumerate(rows)), _pairs(()))


def _pairs(pairs: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(pairs), dtype=torch.int32).view(-1, 2)


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each row: the number of the tree's rows between it and the committed prefix."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent == NONE else out[parent] + 1)
    return out


def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Return the mask, bool [T, T], that lets each row see itself and its ancestors. Row r is in column r."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent != NONE:
            visible[row] |= visible[parent]
    return visible


def _place_in_pairs(parents: tuple[int, ...], parity: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the `rows`, `columns` and `visible` of a tree's layout, with rows placed in pairs of columns.

    Rows are placed in order. The second row of a pair takes the column after its parent if that column is still free.
    """
    rows: list[int] = []
    paths: list[list[int]] = []
    reserved: dict[int, int] = {}
    """First row of a pair -> the column after it, which is kept free for the row's first child."""

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
                reserved[row] = place(row)
        elif parent in reserved:
            column = reserved.pop(parent)
            rows[column] = row
            paths.append([*above, column])
        else:
            align()
            paths.append([*above[:-1], place(parent), place(row)])
    visible = torch.zeros(len(parents), len(rows), dtype=torch.bool)
    for seen, path in zip(visible, paths, strict=True):
        seen[path] = True
    return tuple(rows), tuple(path[-1] for path in paths), visible
