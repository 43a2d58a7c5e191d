"""The KV cache, which stores keys and values in slabs. Each slot takes only as much memory as its own text needs.

`SlabPlan` in `attention.py` writes and reads the rows of a pass.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK, LayerAttention, SlabPass, SlabPlan, slab_indices
from paceline.cache.kv_types import stored_size
from paceline.cache.layout import Layout, layout, prefix_only_layout
from paceline.cache.slots import SlotTable
from paceline.errors import memory_named
from paceline.protocols import Saved
from paceline.types import DraftBudget, Rows


def ring(window: int) -> int:
    """Return the number of columns to keep for a sliding window, rounded up to whole blocks.

    A draft never crosses the end of a block (`SlabCache.fit`), so the ring wraps between two drafts, never inside a
    draft.
    """
    return -(-(window + BLOCK - 1) // BLOCK) * BLOCK


class Slab:
    """The keys and values of all layers with the same kind of attention.

    Keys and values are each [layers, places, kv_heads, capacity, D], with D in its stored size (`kv_types.py`). A slab
    has one place, for one slot (`SlabCache`), or several (`SharedSlabCache`). The *entries* of a slot are the keys and
    values of its tokens, in order, followed by the rows of the draft. Entry i is stored in column `i % capacity`.
    Layers with a window use a ring, which overwrites entries that no later row can attend to. Other slabs grow before
    they would wrap.
    """

    def __init__(self, layers: int, window: int | None, empty: Tensor, limit: int, single: bool = False) -> None:
        """Make a slab that holds no memory yet.

        Args:
            layers: Number of layers.
            window: See `LayerAttention`.
            empty: A tensor [kv_heads, 0, D] with the dtype and device of the slab.
            limit: Maximum number of entries.
            single: See `LayerAttention`.
        """
        kv_heads, _, head_dim = empty.shape
        self.window = window
        self._limit = limit if window is None else min(ring(window), limit)
        self.ring = self._limit < limit
        # Keys and values share one attribute, so that an interrupt cannot leave them with different sizes.
        self.tensors = (empty.new_empty(layers, 0, kv_heads, 0, head_dim),) * (1 if single else 2)

    @property
    def places(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[3]

    def fits(self, reach: int, step: int, growth: float) -> int:
        """Return the capacity that the slab should have to hold `reach` columns.

        This is the current capacity if it is sufficient. Otherwise, it is at least `growth` times the current capacity,
        rounded up to a multiple of `step`. A ring never exceeds its full size.
        """
        if self.ring and reach > self._limit:
            return self._limit
        if reach <= self.capacity:
            return self.capacity
        more = max(reach, int(growth * self.capacity))
        return max(reach, min(-(-more // step) * step, self._limit))

    def resize(self, places: int, capacity: int, used: int) -> None:
        """Change the size to `places` x `capacity`, and keep the first `used` entries of each place.

        Raises:
            OutOfMemory: If there is no memory for the new size.
        """
        old = self.tensors
        layers, held, kv_heads, before, head_dim = old[0].shape
        held, used = min(held, places), min(used, before)
        size = len(old) * layers * places * kv_heads * head_dim * capacity * old[0].element_size()
        cause = f"no memory on {old[0].device} for a KV cache of {size / 2**20:,.0f} MiB"
        with memory_named(
            f"{cause} ({places} x {capacity} positions)",
            "Use a shorter prompt, fewer requests at once, or a smaller dtype or kv_type",
        ):
            # Fill the memory with zeros: masked columns are multiplied by a weight of 0, and 0 times garbage may be
            # NaN.
            new = tuple(_zeros(x, (layers, places, kv_heads, capacity, head_dim)) for x in old)
        for here, there in zip(old, new, strict=True):
            there[:, :held, :, :used] = here[:, :held, :, :used]
        self.tensors = new

    def copy(self, other: Slab, source: int, place: int, top: int) -> None:
        """Copy the first `top` entries of place `source` in slab `other` to place `place`. `other` may be this slab."""
        for slab, theirs in zip(self.tensors, other.tensors, strict=True):
            slab[:, place, :, :top] = theirs[:, source, :, :top]

    def clear(self, place: int, top: int) -> None:
        """Set the first `top` entries to zero. Masked columns have a weight of 0, but 0 times NaN is NaN."""
        for slab in self.tensors:
            slab[:, place, :, :top] = 0

    def holds(self, length: int, top: int) -> bool:
        """Return True if a place to which `top` entries have been written still holds every entry that a row at
        position `length` attends to."""
        return self.window is None or top <= self.capacity or length - self.window + 1 >= top - self.capacity

    def first(self, top: int) -> int:
        """Return the first entry that a place still holds, after `top` entries have been written to it."""
        return 0 if self.window is None else max(0, top - self.capacity)

    def export(self, place: int, first: int, end: int) -> tuple[Tensor, ...]:
        """Return copies of entries `first` to `end` - 1, for the prefix cache. They are the keys and the values, each
        [layers, kv_heads, end - first, D]."""
        columns = self._columns(first, end)
        return tuple(slab[:, place].index_select(2, columns) for slab in self.tensors)

    def restore(self, place: int, first: int, end: int, tensors: Sequence[Tensor]) -> None:
        """Store tensors that `export` returned for the same `first`, up to entry `end` - 1."""
        columns = self._columns(first, end)
        for slab, x in zip(self.tensors, tensors, strict=True):
            slab[:, place].index_copy_(2, columns, x[:, :, : end - first])

    def _columns(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.tensors[0].device) % max(1, self.capacity)

    def move(self, place: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the entries at `source` to the entries at `target`. Read all entries before writing any."""
        here, there = (torch.tensor(x, device=self.tensors[0].device) % self.capacity for x in (source, target))
        for slab in self.tensors:
            slab[:, place, :, there] = slab[:, place, :, here]


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of this shape, with the dtype and device of `like`.

    On a CPU, memory pages are allocated only when they are first written. The cache is larger than the texts in it, so
    filling all of it with zeros would take as long as several passes.
    """
    count = math.prod(shape)
    if like.device.type != "cpu" or not count:
        return like.new_zeros(shape)
    # np.zeros requests huge pages, so even a few writes would allocate most of the memory.
    size = count * like.element_size()
    if sys.platform == "win32":
        pages = mmap.mmap(-1, size)
    else:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class SavedSlabs(Saved):
    """Keys and values of a slot: for each slab, tensors [layers, kv_heads, n, D].

    Attributes:
        top: Number of entries that had been written, including rows that were not committed.
        firsts: First saved entry of each slab.
        windows: Window of each slab (see `LayerAttention`).
        choice: Result of `choose` for the prompt's length, for example a set of rotary factors.
        choose: See `SlabCache`.
    """

    top: int
    firsts: tuple[int, ...]
    windows: tuple[int | None, ...]
    choice: Hashable
    choose: Callable[[int], Hashable]

    def most(self, length: int, prompt: int) -> int:
        """Return the number of tokens that can be loaded, which is at most `length`.

        It is 0 if a window no longer holds the entries that the next row would attend to, or if a prompt of this length
        uses other rotary factors.
        """
        length, seen = min(length, self.length), zip(self.firsts, self.windows, strict=True)
        moved = any(window is not None and first and length - window + 1 < first for first, window in seen)
        return 0 if moved or self.choose(prompt) != self.choice else length


class SlotGroup(NamedTuple):
    """The slots of a pass that are stored in the same slabs.

    Attributes:
        slabs: One slab per kind of attention.
        members: Index of each slot in the pass.
        places: Place of each slot in the slabs.
    """

    slabs: Sequence[Slab]
    members: Sequence[int]
    places: Sequence[int]


class SlabCache(SlotTable):
    """A KV cache whose slots have their own slabs, one per kind of attention.

    The duration of a pass depends on the lengths of the texts, not on the capacity. A slot can grow without moving
    other slots, and its memory is freed when it is released.
    """

    initial_capacity = 256
    """Capacity of a new slab for a short prompt, in entries. Larger capacities are multiples of it."""
    growth = 1.25
    """Minimum growth factor of a slab. It keeps a long text from being copied at every step."""

    def __init__(
        self,
        layers: Sequence[LayerAttention | None],
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        choose: Callable[[int], Hashable] = lambda prompt: None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Make a cache that has no slots yet.

        Args:
            layers: Attention of each layer. None for a layer without attention.
            kv_heads: Number of key heads, for layers that do not set `LayerAttention.heads`.
            head_dim: Size of the key heads, for the same layers.
            limit: Context length of the model, in tokens. The uncommitted rows of a draft may exceed it.
            dtype: Dtype of keys and values.
            device: Device of keys and values.
            choose: Maps a prompt length to the setting of the model that depends on it (see `KVCache.prompts`).
            devices: Device of each part of the model (see `LayerAttention.part`). Empty if the whole model is on
                `device`.
        """
        super().__init__()
        self._choose = choose
        self._layers = tuple(layers)
        self._indices = slab_indices(layers)
        self._kinds = Counter(layer.kind for layer in layers if layer and layer.source is None)
        where = devices or (device,)
        self._empty = [
            torch.empty(kv, 0, stored_size(size, dtype), dtype=dtype, device=where[part])
            for _, _, heads, part, *_ in self._kinds
            for kv, size in (heads or (kv_heads, head_dim),)
        ]
        self._limit = limit + BLOCK
        self._held: dict[int, tuple[Slab, ...]] = {}
        """Taken slot -> its slabs."""
        self._tops: dict[int, int] = {}
        """Taken slot -> number of entries written so far, committed or not."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """All slabs of all slots."""
        return [slab for slabs in self._held.values() for slab in slabs]

    @property
    def capacity(self) -> int:
        """Capacity of the largest slab, in entries."""
        return max((slab.capacity for slab in self.slabs), default=0)

    @property
    def nbytes(self) -> int:
        """Memory of all slabs, in bytes."""
        return sum(x.numel() * x.element_size() for slab in self.slabs for x in slab.tensors)

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        slabs = self._new_slabs()
        for slab in slabs:
            slab.resize(1, self._fits(slab, max(1, prompt)), 0)
        slot = super().acquire(prompt, adapter, lag)
        self._held[slot], self._tops[slot] = slabs, 0
        return slot

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """See `protocols.KVCache.fork`."""
        self.check_taken(slot)
        new = self.acquire(self.prompts[slot], self.adapters[slot], self.lags[slot])
        try:
            self._reserve([new], [self._tops[slot]])
        except BaseException:
            self.release(new)
            raise
        self.lengths[new], (theirs, source), (ours, place) = self.lengths[slot], self._home(slot), self._home(new)
        for slab, other in zip(ours, theirs, strict=True):
            slab.copy(other, source, place, self._tops[slot])
        return new

    @torch.inference_mode()
    def save(self, slot: int) -> SavedSlabs:
        """See `protocols.KVCache.save`."""
        self.check_taken(slot)
        length, top, (slabs, place) = self.lengths[slot], self._tops[slot], self._home(slot)
        firsts = tuple(min(slab.first(top), length) for slab in slabs)
        parts = [slab.export(place, first, length) for slab, first in zip(slabs, firsts, strict=True)]
        return SavedSlabs(
            length,
            tuple(x for part in parts for x in part),
            top,
            firsts,
            tuple(slab.window for slab in slabs),
            self._choose(self.prompts[slot]),
            self._choose,
        )

    @torch.inference_mode()
    def load(self, slot: int, saved: SavedSlabs, length: int) -> int:
        """See `protocols.KVCache.load`."""
        if not (length := saved.most(length, self.prompts[slot])):
            return 0
        # Restore a ring that has dropped entries at its full size, so that `Slab.first` still knows which entries it
        # holds.
        self._reserve([slot], [saved.top if any(saved.firsts) else length])
        (slabs, place), tensors = self._home(slot), iter(saved.tensors)
        for slab, first in zip(slabs, saved.firsts, strict=True):
            slab.restore(place, first, length, [*islice(tensors, len(slab.tensors))])
        self.lengths[slot] = length
        return length

    def restored(self, saved: SavedSlabs) -> SavedSlabs:
        """See `protocols.Restorer`."""
        return replace(saved, choose=self._choose)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._held.pop(slot, None)
        self._tops.pop(slot, None)

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """See `protocols.KVCache.truncate`. The slot starts over at length 0 if a ring has overwritten entries that a
        row at position `length` attends to."""
        self.check_length(slot, length)
        slabs, place = self._home(slot)
        if length < self.lengths[slot] and not all(slab.holds(length, self._tops[slot]) for slab in slabs):
            for slab in slabs:
                slab.clear(place, self._tops[slot])
            length = self._tops[slot] = 0
        self.lengths[slot] = length

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Limit a budget so that the draft ends within the slot's current block, because sums are split at the ends of
        blocks (`BLOCK`). Each row of a tree may take two columns, and alignment may take one more column."""
        self.check_taken(slot)
        left = BLOCK - 1 - self.lengths[slot] % BLOCK
        nodes = left if budget.branch == 1 else max(0, left - 1) // 2
        return budget.within(budget.depth, nodes)

    def begin(self, rows: Rows) -> SlabPass:
        """See `protocols.KVCache.begin`."""
        self.note_pass(rows)
        layouts = [_layout_of(rows, i) for i in range(len(rows.slots))]
        self._reserve(rows.slots, [n + x.visible.shape[1] for n, x in zip(rows.lengths, layouts, strict=True)])
        return SlabPass(self._plans(rows, layouts), self._layers, self._indices, rows.prefill)

    @torch.inference_mode()
    def view(self, slots: Sequence[int], rows: int, layers: Sequence[LayerAttention]) -> SlabPass:
        """Begin a read-only pass of another model over this cache's keys and values.

        Args:
            slots: Slots of the pass.
            rows: Number of rows of each slot. Each row attends to all committed tokens, at the position after them.
            layers: Attention of the other model's layers. Their `source` is a layer of this cache.

        Raises:
            OutOfMemory: If a slot is full and there is no memory to extend it.
        """
        lengths, count = tuple(self.lengths[slot] for slot in slots), len(slots)
        tokens = torch.zeros(count, rows, dtype=torch.int64)
        passing = Rows(tokens, tokens, tuple(slots), lengths, ((),) * count, (0,) * count)
        self._reserve(slots, [length + 1 for length in lengths])
        plans = self._plans(passing, [prefix_only_layout(rows)] * count)
        return SlabPass(plans, layers, [self._indices[layer.source or 0] for layer in layers], False)

    def _plans(self, rows: Rows, layouts: Sequence[Layout]) -> list[list[SlabPlan]]:
        """Return the plans for a pass with these layouts, by kind of attention."""
        groups, plans = self._groups(rows.slots), []
        for kind, (window, mutual, *_, chunked) in enumerate(self._kinds):
            seen = [x.mutual() for x in layouts] if mutual or (rows.given and rows.given.is_mutual(window)) else layouts
            plans.append(
                [
                    SlabPlan(slabs[kind].tensors, window, rows, members, places, [seen[i] for i in members], chunked)
                    for slabs, members, places in groups
                ]
            )
        return plans

    def _new_slabs(self) -> tuple[Slab, ...]:
        """Return one slab per kind of attention. They hold no memory yet."""
        each = zip(self._kinds.items(), self._empty, strict=True)
        return tuple(
            Slab(count, window, empty, self._limit, single) for ((window, _, _, _, single, _), count), empty in each
        )

    def _fits(self, slab: Slab, reach: int) -> int:
        return slab.fits(reach, self.initial_capacity, self.growth)

    def _groups(self, slots: Sequence[int]) -> list[SlotGroup]:
        """Group the taken slots of a pass by the slabs that hold them."""
        return [SlotGroup(self._held[slot], [i], [0]) for i, slot in enumerate(slots)]

    def _home(self, slot: int) -> tuple[Sequence[Slab], int]:
        """Return the slabs of a taken slot, and its place in them."""
        ((slabs, _, (place,)),) = self._groups([slot])
        return slabs, place

    def _reserve(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """Make room for `ends[i]` columns in each slot i. Raise `OutOfMemory` if there is no memory."""
        for slot, end in zip(slots, ends, strict=True):
            used = self._tops[slot]
            for slab in self._held[slot]:
                capacity = self._fits(slab, end)
                if capacity != slab.capacity:
                    slab.resize(1, capacity, used)
            self._tops[slot] = max(used, end)

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        return _layout_of(rows, index).columns

    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        slabs, place = self._home(slot)
        for slab in slabs:
            slab.move(place, source, target)


def _layout_of(rows: Rows, index: int) -> Layout:
    """Return the layout of one slot's rows in a pass, including the rows that earlier passes over the same tree have
    written."""
    start, length = rows.starts[index], rows.lengths[index]
    return layout(rows.parents[index][: start + rows.counts[index]], length % 2, start)
