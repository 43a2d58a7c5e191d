"""Where the rows of a tree lie in the cache while they are verified.

A sum of floats depends on its order, and a bfloat16 product adds keys in pairs of neighbouring columns (2i, 2i + 1).
So that a row's result has the bits it would have in plain decoding, its ancestors must lie in the order of their
positions and in the same pairs, whatever lies between: gaps hold zeros, and adding zero changes nothing. A chain has
this by nature. In a tree, a row at an even position is the first of a pair and each of its children the second; every
child after the first gets a copy of its parent beside it. Firsts begin at even columns, children or not, so that where
a row lies depends on the rows before it alone: a tree may grow over several passes, and every row keeps those bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

NONE = -1
"""The parent of a row that continues the committed prefix directly."""


@dataclass(frozen=True, slots=True)
class Layout:
    """C columns after the committed prefix.

    `sources[c]`: the row whose keys and values column c holds. `home[r]`: the column where row r itself lies.
    `visible`: bool [T, C], the columns that each row of the pass attends to. `deep` and `below`, int32 [T] and [C]: how
    far beyond the prefix these rows, and those in the columns, stand. `fresh`: the columns that the pass writes, all
    but those that hold the same already.
    """

    sources: tuple[int, ...]
    home: tuple[int, ...]
    visible: Tensor
    deep: Tensor
    below: Tensor
    fresh: tuple[int, ...]

    def mutual(self) -> Layout:
        """The same columns, where every row sees every row."""
        return replace(self, visible=torch.ones_like(self.visible))


@lru_cache(maxsize=256)
def layout(parents: tuple[int, ...], length: int, start: int = 0) -> Layout:
    """The layout of rows with these parents (`NONE`: no row of this tree), after a prefix of `length` tokens, for a
    pass over the rows from `start` on.

    Only the parity of `length` matters: pass `length % 2`.
    """
    laid = _laid(parents, length % 2, start)
    if not start:
        return laid
    held = _laid(parents[:start], length % 2, start).sources
    fresh = [c for c, row in enumerate(laid.sources) if c >= len(held) or held[c] != row]
    return replace(laid, visible=laid.visible[start:], deep=laid.deep[start:], fresh=tuple(fresh))


def _laid(parents: tuple[int, ...], parity: int, start: int) -> Layout:
    """All rows, those of earlier passes too."""
    rows = tuple(range(len(parents)))
    if parents[1:] == rows[:-1]:
        sources, home, visible = rows, rows, torch.ones(len(rows), len(rows), dtype=torch.bool).tril_()
    # What is verified has one root. Where earlier passes fed several, the tree only drafts, and lies as it comes.
    elif NONE in parents[1:start]:
        sources, home, visible = rows, rows, ancestors(parents)
    else:
        sources, home, visible = _paired(parents, parity)
    deep = torch.tensor(depths(parents), dtype=torch.int32)
    return Layout(sources, home, visible, deep, deep[list(sources)], tuple(range(len(sources))))


def depths(parents: Sequence[int]) -> list[int]:
    """Rows of this tree between each row and the committed prefix."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent == NONE else out[parent] + 1)
    return out


def ancestors(parents: tuple[int, ...]) -> Tensor:
    """Bool [T, T]: row r sees itself and its ancestors, every row lying in the column of its own number."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent != NONE:
            visible[row] |= visible[parent]
    return visible


def _paired(parents: tuple[int, ...], parity: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """`sources`, `home` and `visible`: rows in order, each beside its parent if it is the second of a pair and that
    place is free."""
    sources: list[int] = []
    paths: list[list[int]] = []
    beside: dict[int, int] = {}
    """The column kept free beside a first of a pair, until its first child comes."""

    def place(row: int) -> int:
        sources.append(row)
        return len(sources) - 1

    def align() -> None:
        if (parity + len(sources)) % 2:
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
            sources[column] = row
            paths.append([*above, column])
        else:
            align()
            paths.append([*above[:-1], place(parent), place(row)])
    visible = torch.zeros(len(parents), len(sources), dtype=torch.bool)
    for line, path in zip(visible, paths, strict=True):
        line[path] = True
    return tuple(sources), tuple(path[-1] for path in paths), visible
