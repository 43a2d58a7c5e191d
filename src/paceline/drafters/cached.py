"""Base classes for drafters that have their own KV cache, and for drafters that read hidden states into it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.cache.slab import SavedSlabs, SlabCache
from paceline.drafters.base import Drafter
from paceline.protocols import KVCache, Saved
from paceline.types import Tap, Verdict
from paceline.verify.tree import PREFILL_ROWS
from paceline.vision.prompt import ImagePrompt

MAX_PENDING = 8 * PREFILL_ROWS
"""Maximum number of positions with pending states. While a request does not draft, its states are not read, which saves
time but takes memory (48 MiB for three taps of width 4096 in bfloat16)."""

_MAX_UNCOPIED_BYTES, _MAX_UNCOPIED_PASSES = 1 << 20, 16
"""If the states of a pass take at most `_MAX_UNCOPIED_BYTES` bytes, they are not copied until `_MAX_UNCOPIED_PASSES`
such passes wait."""


class PendingStates:
    """Hidden states [n, width] that a drafter has received but not read yet, in the order of positions."""

    def __init__(self, parts: Sequence[Tensor] = ()) -> None:
        self._parts = list(parts)
        self._count = sum(map(len, parts))
        self._uncopied: list[list[Tensor]] = []
        """Taps [T, H] of rounds that kept only row 0. They follow `_parts`. Joining many of them takes as long as
        joining one."""

    def __len__(self) -> int:
        return self._count

    @property
    def parts(self) -> list[Tensor]:
        """The states, in tensors [n, width]."""
        self._join()
        return self._parts

    def add(self, taps: Sequence[Tap], out: Mapping[Tap, Tensor], path: Sequence[int] | None = None) -> None:
        """Append the hidden states of a pass. All taps of a row are concatenated.

        States are copied, because a view would keep the states of the whole pass in memory. Copies of small passes are
        delayed and made together, so that a drafter that is switched off costs less.

        Args:
            taps: The taps to keep.
            out: Hidden states [T, H] of each tap.
            path: Rows to keep in addition to row 0. None keeps all rows.
        """
        if path is not None and not path and out[taps[0]].untyped_storage().nbytes() <= _MAX_UNCOPIED_BYTES:
            self._uncopied.append([out[tap] for tap in taps])
            self._count += 1
            if len(self._uncopied) == _MAX_UNCOPIED_PASSES:
                self._join()
            return
        kept: slice | list[int] = slice(None)
        if path is not None:
            # The accepted path of a chain is its first rows, so a slice can replace a gather for each tap.
            chain = not path or path[-1] == len(path)
            kept = slice(1 + len(path)) if chain else [0, *path]
        self.parts.append(torch.cat([out[tap][kept] for tap in taps], -1))
        self._count += len(self._parts[-1])

    def _join(self) -> None:
        if not self._uncopied:
            return
        first = torch.tensor([0, *accumulate(len(taps[0]) for taps in self._uncopied[:-1])])
        joined = [torch.cat(states)[first] for states in zip(*self._uncopied, strict=True)]
        self._parts.append(torch.cat(joined, -1))
        self._uncopied = []

    def take(self, count: int) -> Tensor:
        """Remove and return the first `count` states, or all states if there are fewer. There must be at least one
        state."""
        count = min(count, self._count)
        taken, missing = [], count
        while missing:
            part = self.parts.pop(0)
            taken.append(part[:missing])
            if len(part) > missing:
                self._parts.insert(0, part[missing:])
            missing -= len(taken[-1])
        self._count -= count
        return torch.cat(taken)

    def first(self, count: int) -> PendingStates:
        """Return the first `count` states. The tensors are shared, since they are never written to."""
        return PendingStates([torch.cat(self.parts)[:count]] if count else ())


@dataclass(slots=True)
class CachedSlot:
    """One request of a drafter that has its own cache.

    Attributes:
        cache_slot: Slot in the drafter's cache.
        token_ids: The text so far, in the drafter's tokens. The cache holds a prefix of it.
        pending: States [taps * H] of positions that are not in the cache yet.
        images: The prompt with its images. None if it contains no images.
    """

    cache_slot: int
    token_ids: list[int]
    pending: PendingStates = field(default_factory=PendingStates)
    images: ImagePrompt | None = None


S = TypeVar("S", bound=CachedSlot)


class CachedDrafter(Drafter, Generic[S]):
    """A drafter that has its own cache, with one slot per request."""

    def __init__(self, cache: KVCache, slot_type: type[S]) -> None:
        self._cache, self._slot_type = cache, slot_type
        self._slots: dict[int, S] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._reclaim()
        self._slots[slot] = self._slot_type(self._cache.acquire(len(prompt)), list(prompt))
        self._slots[slot].images = prompt if isinstance(prompt, ImagePrompt) else None

    def _reclaim(self) -> None:
        """Release cache slots that no request holds. An interrupt just after `acquire` can leave such a slot."""
        for cache_slot in {*range(len(self._cache.lengths))} - {state.cache_slot for state in self._slots.values()}:
            self._cache.release(cache_slot)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._slots[slot].token_ids += verdict.tokens

    def unread(self, slot: int) -> int | None:
        state = self._slots[slot]
        return len(state.token_ids) - self._cache.lengths[state.cache_slot]

    def release(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state:
            self._cache.release(state.cache_slot)


@dataclass(frozen=True, slots=True)
class SavedStates(Saved):
    """A copy of a drafter's cache slot, and of the pending states after it."""

    cache: SavedSlabs
    pending: PendingStates

    def most(self, length: int, prompt: int) -> int:
        length = min(length, self.length)
        return length if self.cache.holds(min(length, self.cache.length), prompt) else 0


class StateDrafter(CachedDrafter[S]):
    """A drafter that reads the target's hidden states (`taps`) into its cache when a draft needs them."""

    _cache: SlabCache

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self._reclaim()
        like = self._slots[source]
        pending = PendingStates(like.pending.parts)
        fork = self._cache.fork(like.cache_slot)
        self._slots[slot] = replace(like, cache_slot=fork, token_ids=list(prompt), pending=pending)

    @torch.inference_mode()
    def save(self, slot: int) -> SavedStates | None:
        state = self._slots[slot]
        cached, pending = self._cache.save(state.cache_slot), state.pending.first(len(state.pending))
        length = cached.length + len(pending)
        return SavedStates(length, (*cached.tensors, *pending.parts), cached, pending) if length else None

    def load(self, slot: int, saved: SavedStates, length: int) -> None:
        """Load the saved keys and values for the first `length` tokens. If fewer were saved, the states of the other
        tokens become pending."""
        state = self._slots[slot]
        read = self._cache.load(state.cache_slot, saved.cache, min(length, saved.cache.length))
        state.pending = saved.pending.first(length - read)

    def restored(self, saved: SavedStates) -> SavedStates:
        return replace(saved, cache=self._cache.restored(saved.cache))

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._receive(self._slots[slot], taps)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        super().observe(slot, verdict, out)
        self._receive(self._slots[slot], out, verdict.path)

    @torch.inference_mode()
    def _receive(self, state: S, taps: Mapping[Tap, Tensor], path: Sequence[int] | None = None) -> None:
        state.pending.add(self.taps, taps, path)
        while len(state.pending) > MAX_PENDING:
            self._read_pending(state)

    @abstractmethod
    def _read_pending(self, state: S) -> None:
        """Read some of a request's pending states into the cache, to limit the memory that they take."""
