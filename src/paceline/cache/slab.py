"""The KV cache: every slot has memory of its own length. `attention.py` reads it."""

from __future__ import annotations

import math
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK, LayerAttention, SlabPass, SlabPlan, slab_indices
from paceline.cache.layout import Layout, layout, nothing
from paceline.cache.slots import SlotTable
from paceline.errors import memory_named
from paceline.protocols import Saved
from paceline.types import DraftBudget, Rows


def ring(window: int) -> int:
    """Number of columns that a layer with a sliding window keeps.

    A draft stays within its block, so a ring of whole blocks wraps between drafts and never inside one.
    """
    return -(-(window + BLOCK - 1) // BLOCK) * BLOCK


class Slab:
    """Keys and values of all layers with one kind of attention, addressed by position.

    Each [layers, places, kv_heads, capacity, D], for one slot (`SlabCache`) or several (`SharedSlabCache`); a position
    lies in column `position % capacity`. Layers with a window keep a ring: what no later row can see is overwritten. A
    full slab grows before it would wrap.
    """

    def __init__(self, layers: int, window: int | None, empty: Tensor, limit: int, single: bool = False) -> None:
        """`empty`: [kv_heads, 0, D], for dtype, device and sizes. `limit`: the most positions ever needed. `single`:
        one tensor is keys and values both."""
        kv_heads, _, head_dim = empty.shape
        self.window = window
        self._limit = limit if window is None else min(ring(window), limit)
        self.ring = self._limit < limit
        # One attribute, so that an interrupt between two stores cannot leave slabs of two sizes.
        self.tensors = (empty.new_empty(layers, 0, kv_heads, 0, head_dim),) * (1 if single else 2)

    @property
    def places(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[3]

    def fits(self, reach: int, step: int, growth: float) -> int:
        """Capacity for columns up to `reach`: the present one, `growth` times it in whole steps, or all of a ring."""
        if self.ring and reach > self._limit:
            return self._limit
        if reach <= self.capacity:
            return self.capacity
        more = max(reach, int(growth * self.capacity))
        return max(reach, min(-(-more // step) * step, self._limit))

    def resize(self, places: int, capacity: int, used: int) -> None:
        """Make room for `places` x `capacity`, keeping the first `used` positions. Raises `OutOfMemory`."""
        old = self.tensors
        layers, held, kv_heads, before, head_dim = old[0].shape
        held, used = min(held, places), min(used, before)
        size = len(old) * layers * places * kv_heads * head_dim * capacity * old[0].element_size()
        cause = f"no memory on {old[0].device} for a KV cache of {size / 2**20:,.0f} MiB"
        with memory_named(
            f"{cause} ({places} x {capacity} positions)",
            "Use a shorter prompt, fewer requests at once, or a smaller dtype",
        ):
            # Zeros, because a masked column still meets a weight of 0, and 0 times garbage may be NaN.
            new = tuple(_zeros(x, (layers, places, kv_heads, capacity, head_dim)) for x in old)
        for here, there in zip(old, new, strict=True):
            there[:, :held, :, :used] = here[:, :held, :, :used]
        self.tensors = new

    def copy(self, other: Slab, source: int, place: int, top: int) -> None:
        """Copy the first `top` positions of a place of another slab, or of this one, to a place here."""
        for slab, theirs in zip(self.tensors, other.tensors, strict=True):
            slab[:, place, :, :top] = theirs[:, source, :, :top]

    def clear(self, place: int, top: int) -> None:
        """Set zeros again: a masked column may still meet a weight of 0, and 0 times NaN is NaN."""
        for slab in self.tensors:
            slab[:, place, :, :top] = 0

    def holds(self, length: int, top: int) -> bool:
        """Whether row `length` would find all that it sees in a place where `top` positions have been written."""
        return self.window is None or top <= self.capacity or length - self.window + 1 >= top - self.capacity

    def first(self, top: int) -> int:
        """First position that is still held where `top` have been written."""
        return 0 if self.window is None else max(0, top - self.capacity)

    def read(self, place: int, first: int, end: int) -> tuple[Tensor, ...]:
        """Copies of keys and values at positions `first` to `end` - 1, each [layers, kv_heads, end - first, D]."""
        columns = self._columns(first, end)
        return tuple(slab[:, place].index_select(2, columns) for slab in self.tensors)

    def write(self, place: int, first: int, end: int, tensors: Sequence[Tensor]) -> None:
        """Store what `read` returned for the same `first`, up to position `end` - 1."""
        columns = self._columns(first, end)
        for slab, x in zip(self.tensors, tensors, strict=True):
            slab[:, place].index_copy_(2, columns, x[:, :, : end - first])

    def _columns(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.tensors[0].device) % max(1, self.capacity)

    def move(self, place: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy positions `source` to positions `target`; all are read before any is written."""
        here, there = (torch.tensor(x, device=self.tensors[0].device) % self.capacity for x in (source, target))
        for slab in self.tensors:
            slab[:, place, :, there] = slab[:, place, :, here]


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros whose memory pages a CPU touches only when they are written: a cache has room for more and longer texts
    than it holds, and filling all of it takes as long as several passes."""
    count = math.prod(shape)
    if like.device.type != "cpu" or not count:
        return like.new_zeros(shape)
    # Not NumPy's zeros: NumPy asks for huge pages, all of which are soon touched.
    size = count * like.element_size()
    if sys.platform == "win32":
        pages = mmap.mmap(-1, size)
    else:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class SavedSlabs(Saved):
    """Keys and values of a slot, the tensors [layers, kv_heads, n, D] of each slab.

    `top`: number of positions that were written. `firsts`: first position held by each slab; `windows`: their sliding
    windows. `choice`: what the model chose for the prompt's length, by `choose`.
    """

    top: int
    firsts: tuple[int, ...]
    windows: tuple[int | None, ...]
    choice: Hashable
    choose: Callable[[int], Hashable]

    def most(self, length: int, prompt: int) -> int:
        """0 where a window's ring cannot go back so far, or rotary factors are for another prompt length."""
        length, seen = min(length, self.length), zip(self.firsts, self.windows, strict=True)
        moved = any(window is not None and first and length - window + 1 < first for first, window in seen)
        return 0 if moved or self.choose(prompt) != self.choice else length


class SlotGroup(NamedTuple):
    """Slots of a pass whose keys and values lie in the same slabs, one of each kind: their indices in the pass, and
    their places there."""

    slabs: Sequence[Slab]
    members: Sequence[int]
    places: Sequence[int]


class SlabCache(SlotTable):
    """Slots with slabs of their own, one per kind of attention. Only the length reached is read, whatever the capacity.

    A slot's memory follows its own text: no other slot is touched when it grows, and it is given back with the slot.
    """

    initial_capacity = 256
    """Positions of a new slab, and the steps in which it grows when a text outgrows it."""
    growth = 1.25
    """The least factor by which it grows, so that a long text is not copied at every step."""

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
        """`layers`: None for one that does not attend. `kv_heads`, `head_dim`: of layers that do not say. `limit`: the
        context length; a slab may exceed it by the rows of a draft that is never committed. `choose`: from a prompt's
        length to what the model chooses by it (see `KVCache.prompts`). `devices`: of the layers' parts; () if all lie
        on `device`."""
        super().__init__()
        self._choose = choose
        self._layers = tuple(layers)
        self._indices = slab_indices(layers)
        self._kinds = Counter(layer.kind for layer in layers if layer and layer.source is None)
        where = devices or (device,)
        self._empty = [
            torch.empty(kv, 0, size, dtype=dtype, device=where[part])
            for _, _, heads, part, *_ in self._kinds
            for kv, size in (heads or (kv_heads, head_dim),)
        ]
        self._limit = limit + BLOCK
        self._held: dict[int, tuple[Slab, ...]] = {}
        """Taken slot -> its slabs."""
        self._tops: dict[int, int] = {}
        """Taken slot -> positions written so far, committed or not."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """All slabs."""
        return [slab for slabs in self._held.values() for slab in slabs]

    @property
    def capacity(self) -> int:
        """Positions of the longest slot that memory is held for, in the layers that keep most."""
        return max((slab.capacity for slab in self.slabs), default=0)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(x.numel() * x.element_size() for slab in self.slabs for x in slab.tensors)

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0) -> int:
        slabs = self._new_slabs()
        for slab in slabs:
            slab.resize(1, self._fits(slab, max(1, prompt)), 0)
        slot = super().acquire(prompt, adapter)
        self._held[slot], self._tops[slot] = slabs, 0
        return slot

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """See `protocols.KVCache.fork`."""
        self.check_taken(slot)
        new = self.acquire(self.prompts[slot], self.adapters[slot])
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
        parts = [slab.read(place, first, length) for slab, first in zip(slabs, firsts, strict=True)]
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
        # A ring that has moved on must be as large as it was then, so that it knows how far back it goes.
        self._reserve([slot], [saved.top if any(saved.firsts) else length])
        (slabs, place), tensors = self._home(slot), iter(saved.tensors)
        for slab, first in zip(slabs, saved.firsts, strict=True):
            slab.write(place, first, length, [*islice(tensors, len(slab.tensors))])
        self.lengths[slot] = length
        return length

    def release(self, slot: int) -> None:
        super().release(slot)
        self._held.pop(slot, None)
        self._tops.pop(slot, None)

    @torch.inference_mode()
    def truncate(self, slot: int, length: int) -> None:
        """A ring that has overwritten what row `length` would see cannot go back: the slot then starts over."""
        self.check_length(slot, length)
        slabs, place = self._home(slot)
        if length < self.lengths[slot] and not all(slab.holds(length, self._tops[slot]) for slab in slabs):
            for slab in slabs:
                slab.clear(place, self._tops[slot])
            length = self._tops[slot] = 0
        self.lengths[slot] = length

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Up to the end of the block, where a tree may need two columns for a row, and one to align."""
        self.check_taken(slot)
        left = BLOCK - 1 - self.lengths[slot] % BLOCK
        nodes = left if budget.branch == 1 else max(0, left - 1) // 2
        return budget.within(budget.depth, nodes)

    def begin(self, rows: Rows) -> SlabPass:
        """See `protocols.KVCache.begin`."""
        self.note_pass(rows)
        layouts = [_layout(rows, i) for i in range(len(rows.slots))]
        self._reserve(rows.slots, [n + x.visible.shape[1] for n, x in zip(rows.lengths, layouts, strict=True)])
        return SlabPass(self._plans(rows, layouts), self._layers, self._indices, rows.prefill)

    @torch.inference_mode()
    def view(self, slots: Sequence[int], rows: int, layers: Sequence[LayerAttention]) -> SlabPass:
        """A pass of `rows` rows of each slot that see all of its text so far, each at the position after it, and that
        write nothing. `layers`: the `source` of each is one of this cache's own. Raises `OutOfMemory`."""
        lengths, count = tuple(self.lengths[slot] for slot in slots), len(slots)
        tokens = torch.zeros(count, rows, dtype=torch.int64)
        passing = Rows(tokens, tokens, tuple(slots), lengths, ((),) * count, (0,) * count)
        self._reserve(slots, [length + 1 for length in lengths])
        plans = self._plans(passing, [nothing(rows)] * count)
        return SlabPass(plans, layers, [self._indices[layer.source or 0] for layer in layers], False)

    def _plans(self, rows: Rows, layouts: Sequence[Layout]) -> list[list[SlabPlan]]:
        """The plans of each kind of attention for a pass with these layouts."""
        groups, plans = self._groups(rows.slots), []
        for kind, (window, mutual, *_, chunked) in enumerate(self._kinds):
            seen = [x.mutual() for x in layouts] if mutual else layouts
            plans.append(
                [
                    SlabPlan(slabs[kind].tensors, window, rows, members, places, [seen[i] for i in members], chunked)
                    for slabs, members, places in groups
                ]
            )
        return plans

    def _new_slabs(self) -> tuple[Slab, ...]:
        """One of each kind, without memory."""
        each = zip(self._kinds.items(), self._empty, strict=True)
        return tuple(
            Slab(count, window, empty, self._limit, single) for ((window, _, _, _, single, _), count), empty in each
        )

    def _fits(self, slab: Slab, reach: int) -> int:
        return slab.fits(reach, self.initial_capacity, self.growth)

    def _groups(self, slots: Sequence[int]) -> list[SlotGroup]:
        """The taken slots of a pass, by the slabs they lie in."""
        return [SlotGroup(self._held[slot], [i], [0]) for i, slot in enumerate(slots)]

    def _home(self, slot: int) -> tuple[Sequence[Slab], int]:
        """A taken slot's slabs, and its place there."""
        ((slabs, _, (place,)),) = self._groups([slot])
        return slabs, place

    def _reserve(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """Make room for the columns before `ends` [B] of these slots. Raises `OutOfMemory`."""
        for slot, end in zip(slots, ends, strict=True):
            used = self._tops[slot]
            for slab in self._held[slot]:
                capacity = self._fits(slab, end)
                if capacity != slab.capacity:
                    slab.resize(1, capacity, used)
            self._tops[slot] = max(used, end)

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        return _layout(rows, index).columns

    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        slabs, place = self._home(slot)
        for slab in slabs:
            slab.move(place, source, target)


def _layout(rows: Rows, index: int) -> Layout:
    """Layout of the rows of one slot of a pass, with those of earlier passes over the same tree."""
    start, length = rows.starts[index], rows.lengths[index]
    return layout(rows.parents[index][: start + rows.counts[index]], length % 2, start)
