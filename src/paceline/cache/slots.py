"""The slots of a KV cache: which are free, how long each is, and what a commit moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from paceline.types import Rows


class SlotTable(ABC):
    """Base class of the KV caches: slots with their lengths, over storage that the subclass owns."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Committed tokens of each slot."""
        self.prompts: list[int] = []
        """Prompt length of each slot's request."""
        self._free: list[int] = []

    def acquire(self, prompt: int = 0) -> int:
        """See `protocols.KVCache.acquire`."""
        if not self._free:
            self._free.append(len(self.lengths))
            self.lengths.append(0)
            self.prompts.append(0)
        slot = self._free.pop()
        self.lengths[slot], self.prompts[slot] = 0, prompt
        return slot

    def release(self, slot: int) -> None:
        """See `protocols.KVCache.release`."""
        if slot not in self._free:
            self.lengths[slot] = 0
            self._free.append(slot)

    @torch.inference_mode()
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """See `protocols.KVCache.commit`."""
        for i, (slot, path) in enumerate(zip(rows.slots, paths, strict=True)):
            if path is None:
                continue
            # Not `self.lengths`: so a commit that failed half-way can be repeated.
            length, columns = rows.lengths[i], self._columns(rows, i)
            moves = [(length + columns[row], length + to) for to, row in enumerate(path, 1) if columns[row] != to]
            if moves:
                self._move(slot, *map(list, zip(*moves, strict=True)))
            self.lengths[slot] = length + 1 + len(path)

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        """Columns, counted from the committed length, of all rows of slot `index` of a pass."""
        return range(len(rows.parents[index]))

    @abstractmethod
    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        """Copy the entries at positions `source` to positions `target`; all are read before any is written."""
