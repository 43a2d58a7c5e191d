"""The rows of a pass, in tensors on the device that keep their addresses when their contents change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cache.layout import NONE, depths
from paceline.types import Rows

Ints = npt.NDArray[np.int32]

SPLIT = 256
"""Number of positions in a split, whose partial sum of attention one program computes. The partial sums are added in
order. Splits begin at multiples of this number, so they contain the same positions for every length and for any rows
and slots of a pass."""


class RowTable:
    """T rows for each of B slots. Row r of a slot is stored in column `length + r` of its place, whatever its depth.

    Attributes:
        tokens: int64 [B, T].
        lengths: Number of committed tokens of each slot, int32 [B].
        places: Place of each slot in the slabs, int32 [B].
        starts: Number of the first row of each slot, int32 [B].
        depths: Number of ancestors of each row, int32 [B, T].
        paths: The row at each depth on the way to each row, ending with the row itself, int32 [B, T, `reach`].
    """

    def __init__(self, slots: int, rows: int, reach: int, device: torch.device) -> None:
        """Allocate a table. `reach` must exceed the depth of every row."""
        self.slots, self.rows, self.reach = slots, rows, reach
        self.tokens = torch.zeros(slots, rows, dtype=torch.long, device=device)
        # All of these share one tensor, so that a pass needs a single transfer.
        self._all = torch.zeros(slots, 3 + rows + rows * reach, dtype=torch.int32, device=device)
        self.lengths, self.places, self.starts = self._all[:, :3].unbind(1)
        self.depths = self._all[:, 3 : 3 + rows]
        self.paths = self._all[:, 3 + rows :].view(slots, rows, reach)

    def fill(self, rows: Rows, places: Sequence[int]) -> None:
        """Write the rows of a pass that is no larger than the table. Padding rows are roots, and padding slots use
        place 0."""
        b, t = rows.tokens.shape
        entries = np.zeros(self._all.shape, dtype=np.int32)
        entries[:, 3:] = _depths_and_paths((), 0, self.rows, self.reach)
        slots = zip(rows.lengths, places, rows.starts, rows.parents, strict=True)
        for entry, (length, place, start, parents) in zip(entries, slots, strict=False):
            entry[:3] = length, place, start
            entry[3:] = _depths_and_paths(parents[: start + t], start, self.rows, self.reach)
        self._all.copy_(torch.from_numpy(entries))
        self.tokens.zero_()
        self.tokens[:b, :t] = rows.tokens

    def positions(self) -> Tensor:
        """Return the positions for rotary embeddings, int64 [B, T]."""
        return (self.lengths[:, None] + self.depths).long()


@lru_cache(maxsize=512)
def _depths_and_paths(parents: tuple[int, ...], start: int, count: int, reach: int) -> Ints:
    """Return the `depths`, followed by the `paths`, of row `start` and all later rows, padded to `count` rows."""
    filled = (*parents, *([NONE] * (start + count - len(parents))))
    deep = depths(filled)
    paths = np.zeros((len(filled), reach), dtype=np.int32)
    for row, parent in enumerate(filled):
        if parent != NONE:
            paths[row] = paths[parent]
        paths[row, deep[row]] = row
    return np.concatenate([np.array(deep[start:], dtype=np.int32), paths[start:].ravel()])
