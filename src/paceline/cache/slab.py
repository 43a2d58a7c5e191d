"""The slab KV cache: acquire, write, commit, fork, release. `attention.py` reads it."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK, LayerAttention, SlabPass, SlabPlan
from paceline.cache.layout import layout
from paceline.errors import OutOfMemory, is_out_of_memory
from paceline.protocols import Saved
from paceline.types import DraftBudget, Rows


def ring(window: int) -> int:
    """Columns that a layer with a window keeps.

    A draft stays within its block, so a ring of whole blocks wraps between drafts and never inside one.
    """
    return -(-(window + BLOCK - 1) // BLOCK) * BLOCK


class Slab:
    """Keys and values of all layers that attend in one way, addressed by position.

    Each [layers, places, kv_heads, capacity, D]. A position stands in column `position % capacity`. Layers with a
    window keep a ring: what no later row can see is overwritten. A full slab grows before it would wrap.
    """

    def __init__(self, layers: int, window: int | None, empty: Tensor, limit: int) -> None:
        """`empty`: [kv_heads, 0, D], for dtype, device and sizes. `limit`: positions that are ever needed."""
        kv_heads, _, head_dim = empty.shape
        self.window = window
        self._limit = limit if window is None else min(ring(window), limit)
        self.ring = self._limit < limit
        # One attribute, so that an interrupt between two stores cannot leave slabs of two sizes.
        self.tensors = (empty.new_empty(layers, 0, kv_heads, 0, head_dim),) * 2

    @property
    def places(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[3]

    def fits(self, reach: int) -> int:
        """The capacity that holds columns up to `reach`: what there is, or twice as much, or all of a ring."""
        if self.ring and reach > self._limit:
            return self._limit
        return self.capacity if reach <= self.capacity else max(reach, min(2 * self.capacity, self._limit))

    def resize(self, places: int, capacity: int, used: int) -> None:
        """Room for so many places and positions; the first `used` positions move along. Raises `OutOfMemory`."""
        old = self.tensors
        layers, held, kv_heads, before, head_dim = old[0].shape
        held, used = min(held, places), min(used, before)
        try:
            # Zeros, because a column that is masked still meets a weight of 0, and 0 times garbage may be NaN.
            new = tuple(_zeros(x, (layers, places, kv_heads, capacity, head_dim)) for x in old)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            size = 2 * layers * places * kv_heads * head_dim * capacity * old[0].element_size()
            raise OutOfMemory(
                f"no memory on {old[0].device} for a KV cache of {size / 2**20:,.0f} MiB "
                f"({places} x {capacity} positions)",
                "Use a shorter prompt, fewer requests at once, or a smaller dtype",
            ) from error
        for here, there in zip(old, new, strict=True):
            there[:, :held, :, :used] = here[:, :held, :, :used]
        self.tensors = (new[0], new[1])

    def copy(self, source: int, place: int, top: int) -> None:
        """All of the first `top` positions of one place to another."""
        for slab in self.tensors:
            slab[:, place, :, :top] = slab[:, source, :, :top]

    def clear(self, place: int, top: int) -> None:
        """Zeros again, so that a shorter neighbour meets no NaN of a request that failed."""
        for slab in self.tensors:
            slab[:, place, :, :top] = 0

    def holds(self, length: int, top: int) -> bool:
        """Whether row `length` would find all that it sees, in a place where `top` positions have been written."""
        return self.window is None or top <= self.capacity or length - self.window + 1 >= top - self.capacity

    def first(self, top: int) -> int:
        """The first position that is still there, where `top` have been written."""
        return 0 if self.window is None else max(0, top - self.capacity)

    def read(self, place: int, first: int, end: int) -> tuple[Tensor, ...]:
        """A copy of the positions from `first` to `end`: keys and values, each [layers, kv_heads, end - first, D]."""
        columns = self._columns(first, end)
        return tuple(slab[:, place].index_select(2, columns) for slab in self.tensors)

    def write(self, place: int, first: int, end: int, tensors: Sequence[Tensor]) -> None:
        """What `read` gave from the same `first` on, up to `end`."""
        columns = self._columns(first, end)
        for slab, x in zip(self.tensors, tensors, strict=True):
            slab[:, place].index_copy_(2, columns, x[:, :, : end - first])

    def _columns(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.tensors[0].device) % max(1, self.capacity)

    def move(self, place: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Entries at positions `source` to positions `target` (disjoint columns or overlapping: all read first)."""
        here, there = (torch.tensor(x, device=self.tensors[0].device) % self.capacity for x in (source, target))
        for slab in self.tensors:
            slab[:, place, :, there] = slab[:, place, :, here]


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of a CPU's memory only what is written is ever touched: a cache has room for more slots and longer texts than it
    holds, and to fill all of it with zeros takes as long as some passes."""
    count = math.prod(shape)
    if like.device.type != "cpu" or not count:
        return like.new_zeros(shape)
    # Not NumPy's zeros: it asks for large pages, of which every one is soon touched.
    size = count * like.element_size()
    if sys.platform == "win32":
        pages = mmap.mmap(-1, size)
    else:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class SavedSlabs(Saved):
    """The keys and values of a slot, two tensors [layers, kv_heads, n, D] per slab.

    `top`: the positions that were written. `firsts`: for each slab the position of its first column, and `windows` what
    a row sees. `choice`: what the model had chosen by the length of the prompt, and `choose` how.
    """

    top: int
    firsts: tuple[int, ...]
    windows: tuple[int | None, ...]
    choice: Hashable
    choose: Callable[[int], Hashable]

    def holds(self, length: int, prompt: int) -> bool:
        """Not where a window's ring cannot go back so far, and not where positions were turned for another length."""
        seen = zip(self.firsts, self.windows, strict=True)
        return (
            length <= self.length
            and all(window is None or not first or length - window + 1 >= first for first, window in seen)
            and self.choose(prompt) == self.choice
        )


def _no_choice(prompt: int) -> Hashable:
    return None


class SlabCache:
    """Slots over one slab per kind of attention. Only the length reached is read, whatever the capacity.

    Active slots lie side by side (a slot's *place*), so that a batch is a view: when one is released, the last takes
    its place.
    """

    first = 256
    """Positions of a new slab. It doubles when a text outgrows it."""

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        choose: Callable[[int], Hashable] = _no_choice,
    ) -> None:
        """`layers`: how each one attends. `limit`: the context length; a slab may pass it by the rows of a draft
        that is never committed. `choose`: from a prompt's length to what the model chooses by it (see `prompts`)."""
        self._choose = choose
        self._layers = tuple(layers)
        empty = torch.empty(kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._kinds = tuple(dict.fromkeys(layer.kind for layer in layers))
        counts = [sum(layer.kind == kind for layer in layers) for kind in self._kinds]
        self.slabs = tuple(
            Slab(count, window, empty, limit + BLOCK) for count, (window, _) in zip(counts, self._kinds, strict=True)
        )
        self._lengths: list[int] = []
        self._prompts: list[int] = []
        self._tops: list[int] = []
        """Positions written in each slot so far, committed or not."""
        self._free: list[int] = []
        self._places: list[int] = []
        """The slots side by side: `_places[place]` is the slot there."""
        self._home: dict[int, tuple[int, ...]] = {}

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    @property
    def prompts(self) -> Sequence[int]:
        return self._prompts

    @property
    def capacity(self) -> int:
        """Positions per slot that memory is held for, in the layers that keep most."""
        return max(slab.capacity for slab in self.slabs)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(x.numel() * x.element_size() for slab in self.slabs for x in slab.tensors)

    @torch.inference_mode()
    def acquire(self, prompt: int = 0) -> int:
        for slab in self.slabs:
            if slab.places == len(self._places):
                slab.resize(max(1, 2 * slab.places), slab.fits(self.first), max(self._tops, default=0))
        if not self._free:
            self._free.append(len(self._lengths))
            self._lengths.append(0)
            self._prompts.append(0)
            self._tops.append(0)
        slot = self._free.pop()
        self._prompts[slot] = prompt
        self._lengths[slot] = self._tops[slot] = 0
        self._places.append(slot)
        return slot

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """A new slot that begins with all that `slot` has committed. Raises `OutOfMemory`."""
        new = self.acquire(self._prompts[slot])
        self._lengths[new] = self._lengths[slot]
        self._tops[new] = self._tops[slot]
        for slab in self.slabs:
            slab.copy(self._places.index(slot), self._places.index(new), self._tops[slot])
        return new

    @torch.inference_mode()
    def save(self, slot: int) -> SavedSlabs:
        """See `protocols.KVCache.save`."""
        length, top, place = self._lengths[slot], self._tops[slot], self._places.index(slot)
        firsts = tuple(min(slab.first(top), length) for slab in self.slabs)
        parts = [slab.read(place, first, length) for slab, first in zip(self.slabs, firsts, strict=True)]
        return SavedSlabs(
            length,
            tuple(x for part in parts for x in part),
            top,
            firsts,
            tuple(slab.window for slab in self.slabs),
            self._choose(self._prompts[slot]),
            self._choose,
        )

    @torch.inference_mode()
    def load(self, slot: int, saved: SavedSlabs, length: int) -> int:
        """See `protocols.KVCache.load`."""
        if not saved.holds(length, self._prompts[slot]):
            return 0
        # A ring that has moved on must be as large as it was then, so that it knows how far back it goes.
        self._reach([slot], [saved.top if any(saved.firsts) else length])
        pairs = zip(saved.tensors[::2], saved.tensors[1::2], strict=True)
        for slab, first, pair in zip(self.slabs, saved.firsts, pairs, strict=True):
            slab.write(self._places.index(slot), first, length, pair)
        self._lengths[slot] = length
        return length

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        if slot not in self._places:
            return
        place, last = self._places.index(slot), len(self._places) - 1
        moved = self._places[last]
        for slab in self.slabs:
            if place != last:
                slab.copy(last, place, max(self._tops[slot], self._tops[moved]))
            slab.clear(last, self._tops[moved])
        self._places[place] = moved
        self._places.pop()
        self._lengths[slot] = self._tops[slot] = 0
        self._free.append(slot)
        if not self._places:
            # What one long text or one wide batch needed is not held for the next.
            for slab in self.slabs:
                slab.resize(0, 0, 0)

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """A ring that has overwritten what row `length` would see cannot go back: the slot then starts over."""
        if length < self._lengths[slot] and not all(slab.holds(length, self._tops[slot]) for slab in self.slabs):
            for slab in self.slabs:
                slab.clear(self._places.index(slot), self._tops[slot])
            length = self._tops[slot] = 0
        self._lengths[slot] = length

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Up to the end of the block, where a tree may need two columns for a row, and one to align."""
        left = BLOCK - 1 - self._lengths[slot] % BLOCK
        nodes = left if budget.branch == 1 else max(0, left - 1) // 2
        return budget.within(budget.depth, nodes)

    def begin(self, rows: Rows) -> SlabPass:
        slots = zip(rows.parents, rows.lengths, rows.starts, rows.counts, strict=True)
        layouts = [layout(parents[: start + count], n % 2, start) for parents, n, start, count in slots]
        self._home.update((slot, x.home) for slot, x in zip(rows.slots, layouts, strict=True))
        self._reach(rows.slots, [n + x.visible.shape[1] for n, x in zip(rows.lengths, layouts, strict=True)])
        places = [self._places.index(slot) for slot in rows.slots]
        plans = [
            SlabPlan(slab.tensors, window, places, rows, [x.mutual() for x in layouts] if mutual else layouts)
            for slab, (window, mutual) in zip(self.slabs, self._kinds, strict=True)
        ]
        return SlabPass(plans, self._layers, rows.prefill)

    def _reach(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """Room for the columns before `ends` [B] of these slots. Raises `OutOfMemory`."""
        for slot, end in zip(slots, ends, strict=True):
            self._tops[slot] = max(self._tops[slot], end)
        for slab in self.slabs:
            capacity = slab.fits(max(ends))
            if capacity != slab.capacity:
                slab.resize(len(self._places), capacity, max(self._tops))

    @torch.inference_mode()
    def commit(self, slot: int, path: Sequence[int]) -> None:
        length, home = self._lengths[slot], self._home[slot]
        moves = [(length + home[row], length + to) for to, row in enumerate(path, 1) if home[row] != to]
        if moves:
            source, target = zip(*moves, strict=True)
            for slab in self.slabs:
                slab.move(self._places.index(slot), source, target)
        self._lengths[slot] = length + 1 + len(path)
