"""The slots of a KV cache: which slots are free, how many tokens they hold, and which entries a commit moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from paceline.errors import CacheError
from paceline.types import Rows


class SlotTable(ABC):
    """Base class of the KV caches. It manages the slots and their lengths. The subclass manages the storage."""

    rectangle = False
    """True if every slot takes as much memory as the longest slot, and the number of slots doubles when it grows."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Number of committed tokens of each slot."""
        self.prompts: list[int] = []
        """Prompt length of each slot's request."""
        self.adapters: list[int] = []
        """Adapter of each slot's request."""
        self.lags: list[int] = []
        """Difference between length and rotary position of each slot's text (see `protocols.KVCache.lags`)."""
        self._free: list[int] = []
        self._begun: dict[int, int] = {}
        """Slot -> `Rows.number` of its latest pass, until the pass is committed."""
        self._before: dict[int, int] = {}
        """Slot -> its length before its latest commit."""

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        """See `protocols.KVCache.acquire`."""
        if not self._free:
            # Add the slot to `_free` last, so that an interrupt never leaves a free slot without entries in the other
            # lists.
            self.prompts.append(0)
            self.adapters.append(0)
            self.lags.append(0)
            self.lengths.append(0)
            self._free.append(len(self.lengths) - 1)
        slot = self._free.pop()
        self.lengths[slot], self.prompts[slot], self.adapters[slot], self.lags[slot] = 0, prompt, adapter, lag
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
        """Record that these rows belong to the latest pass of their slots.

        Raises:
            CacheError: If a slot is free or does not exist.
        """
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
            # Count from the length before the pass, not from `self.lengths`. If a commit fails half-way, the round is
            # repeated as a new pass, although `self.lengths` has already grown for some of its slots.
            length, columns = rows.lengths[i], self._columns(rows, i)
            moves = [(length + columns[row], length + to) for to, row in enumerate(path, 1) if columns[row] != to]
            if moves:
                self._move(slot, *map(list, zip(*moves, strict=True)))
            self.lengths[slot], self._before[slot] = length + 1 + len(path), length
            del self._begun[slot]

    def check_taken(self, slot: int) -> None:
        """Raise `CacheError` if the slot is free or does not exist."""
        if not 0 <= slot < len(self.lengths) or slot in self._free:
            raise CacheError(
                f"slot {slot!r} is not taken", "Use a slot returned by acquire or fork that has not been released"
            )

    def check_length(self, slot: int, length: int) -> None:
        """Raise `CacheError` unless the slot is taken and holds at least `length` tokens."""
        self.check_taken(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise CacheError(
                f"slot {slot} holds {self.lengths[slot]} tokens and cannot be cut to {length}",
                f"Pass a length from 0 to {self.lengths[slot]}",
            )

    def check_commit(self, slot: int, rows: Rows, index: int) -> None:
        """Raise `CacheError` unless `rows` belong to the slot's latest pass and have not been committed yet."""
        self.check_taken(slot)
        if self._begun.get(slot) != rows.number:
            raise CacheError(
                f"this pass of slot {slot} has already been committed, or a later pass has begun",
                "Commit only the slot's latest pass, and only once",
            )
        # If a round failed half-way through its commits and is now repeated, some slots have already advanced.
        if rows.lengths[index] not in (self.lengths[slot], self._before.get(slot)):
            raise CacheError(
                f"slot {slot} holds {self.lengths[slot]} tokens, but this pass began after {rows.lengths[index]}",
                "Commit only the slot's latest pass, and only once",
            )

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        """Return the column of each row of slot `index` of a pass, counted from the committed length."""
        return range(len(rows.parents[index]))

    @abstractmethod
    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        """Copy the entries at `source` to the entries at `target`. Read all entries before writing any.

        Entry i holds the keys and values of token i, or of a row of the draft after the committed tokens.
        """
