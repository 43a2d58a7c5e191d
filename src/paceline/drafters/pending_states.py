"""Hidden states that a drafter was told of and has not read yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.protocols import KVCache, Saved
from paceline.types import Tap
from paceline.verify.tree import PREFILL_ROWS

HELD = 8 * PREFILL_ROWS
"""Positions whose states may wait. Reading them is saved where nobody asks for a draft, which is worth some memory (of
three taps of width 4096 in bfloat16: 48 MiB)."""


class PendingStates:
    """States [n, width], in the order of positions."""

    def __init__(self, parts: Sequence[Tensor] = ()) -> None:
        self._parts = list(parts)
        self._count = sum(map(len, self._parts))

    def __len__(self) -> int:
        return self._count

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self._parts)

    @property
    def full(self) -> bool:
        """Whether so much waits that some should be read."""
        return self._count > HELD

    def add(self, taps: Sequence[Tap], out: Mapping[Tap, Tensor], path: Sequence[int] | None = None) -> None:
        """The taps of a pass [T, H], side by side. `path`: only row 0 and these are kept; None: all of them.

        They are copied: a view would hold the states of the whole pass, or follow a buffer that is used again.
        """
        kept: slice | list[int] = slice(None)
        if path is not None:
            # A chain's rows are the first ones, and a slice spares a gather for each tap.
            chain = not path or path[-1] == len(path)
            kept = slice(1 + len(path)) if chain else [0, *path]
        part = torch.cat([out[tap][kept] for tap in taps], -1)
        self._parts.append(part)
        self._count += len(part)

    def take(self, most: int) -> Tensor:
        """The first `most` of them, at least one being there; the rest goes on waiting."""
        states = torch.cat(self._parts)
        self._parts = [states[most:].clone()] if len(states) > most else []
        self._count = max(0, self._count - most)
        return states[:most]

    def copy(self) -> PendingStates:
        return PendingStates(self._parts)

    def first(self, count: int) -> PendingStates:
        """The first `count` of them. What was pending is never written to, so that both may hold the same."""
        return PendingStates([torch.cat(self._parts)[:count]] if count else ())


@dataclass(frozen=True, slots=True)
class SavedStates(Saved):
    """Of a drafter with a cache of its own: what that holds, and the states that it had yet to read."""

    cache: Saved
    pending: PendingStates

    def holds(self, length: int, prompt: int) -> bool:
        return length <= self.length and self.cache.holds(min(length, self.cache.length), prompt)

    def load(self, cache: KVCache, slot: int, length: int) -> PendingStates:
        """The cache's slot begins with the first `length` tokens, or with those of them that had been read. Returns the
        states of the others."""
        read = cache.load(slot, self.cache, min(length, self.cache.length))
        return self.pending.first(length - read)


@torch.inference_mode()
def save_states(cache: KVCache, slot: int, pending: PendingStates) -> SavedStates | None:
    """None where nothing has been pending."""
    kept, waiting = cache.save(slot), pending.first(len(pending))
    length = kept.length + len(waiting)
    return SavedStates(length, (*kept.tensors, *waiting.parts), kept, waiting) if length else None
