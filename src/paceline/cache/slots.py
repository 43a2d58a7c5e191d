"""The slots of a KV cache: which are free, how long each is, and what a commit moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from paceline.errors import CacheError
from paceline.types import Rows


class SlotTable(ABC):
    """Base class of the KV caches: slots with their lengths, over storage that the subclass owns."""

    rectangle = False
    """Whether all slots are allocated at the length of the longest, and their number doubles when it grows."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Committed tokens of each slot."""
        self.prompts: list[int] = []
        """Prompt length of each slot's request."""
        self.adapters: list[int] = []
        """Adapter of each slot's request."""
        self._free: list[int] = []
        self._begun: dict[int, int] = {}
        """Slot -> number of its latest pass, until that is committed."""
        self._before: dict[int, int] = {}
        """Slot -> its length before its latest commit."""

    def acquire(self, prompt: int = 0, adapter: int = 0) -> int:
        """See `protocols.KVCache.acquire`."""
        if not self._free:
            # The new slot is listed last, so that an interrupt leaves no slot without its entries.
            self.prompts.append(0)
            self.adapters.append(0)
            self.lengths.append(0)
            self._free.append(len(self.lengths) - 1)
        slot = self._free.pop()
        self.lengths[slot], self.prompts[slot], self.adapters[slot] = 0, prompt, adapter
        return slot

    def release(self, slot: int) -> None:
        """See `protocols.KVCache.release`."""
        if slot not in self._free:
            self.check_taken(slot)
            self.lengths[slot] = 0
            self._begun.pop(slot, None)
            self._before.pop(slot, None)
            self._free.append(slot)

    def note_pass(self, rows: Rows) -> None:
        """Make these rows the latest pass of their slots. Raises `CacheError` for a slot that is not taken."""
        for slot in rows.slots:
            self.check_taken(slot)
        self._begun.update(dict.fromkeys(rows.slots, rows.number))

    @torch.inference_mode()
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        """See `protocols.KVCache.commit`."""
        for i, (slot, path) in enumerate(zip(rows.slots, paths, strict=True)):
            if path is None:
                continue
            self.check_commit(slot, rows, i)
            # Not `self.lengths`: so a commit that failed half-way can be repeated.
            length, columns = rows.lengths[i], self._columns(rows, i)
            moves = [(length + columns[row], length + to) for to, row in enumerate(path, 1) if columns[row] != to]
            if moves:
                self._move(slot, *map(list, zip(*moves, strict=True)))
            self.lengths[slot], self._before[slot] = length + 1 + len(path), length
            del self._begun[slot]

    def check_taken(self, slot: int) -> None:
        """Raise `CacheError` for a slot that is free or does not exist."""
        if not 0 <= slot < len(self.lengths) or slot in self._free:
            raise CacheError(
                f"slot {slot!r} is not taken", "Use a slot that acquire or fork returned, until its release"
            )

    def check_length(self, slot: int, length: int) -> None:
        """Raise `CacheError` unless the slot is taken and holds `length` tokens or more."""
        self.check_taken(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise CacheError(
                f"slot {slot} holds {self.lengths[slot]} tokens and cannot be cut to {length}",
                f"Give 0 to {self.lengths[slot]}",
            )

    def check_commit(self, slot: int, rows: Rows, index: int) -> None:
        """Raise `CacheError` unless `rows` belong to the slot's latest pass and are not committed yet."""
        self.check_taken(slot)
        if self._begun.get(slot) != rows.number:
            raise CacheError(
                f"this pass of slot {slot} was committed already, or a later one has begun",
                "Commit the slot's latest pass, once",
            )
        # A slot may be ahead of its rows: a round that failed half-way through its commits is repeated.
        if rows.lengths[index] not in (self.lengths[slot], self._before.get(slot)):
            raise CacheError(
                f"slot {slot} holds {self.lengths[slot]} tokens, and this pass was over {rows.lengths[index]}",
                "Commit the slot's latest pass, once",
            )

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        """Columns, counted from the committed length, of all rows of slot `index` of a pass."""
        return range(len(rows.parents[index]))

    @abstractmethod
    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        """Copy the entries at positions `source` to positions `target`; all are read before any is written."""
