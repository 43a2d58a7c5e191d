"""A KV cache that stores all slots in the same tensors. It is for devices on which one call per pass is much faster
than one call per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.cache.slab import Slab, SlabCache, SlotGroup


class SharedSlabCache(SlabCache):
    """A `SlabCache` whose slots share one slab per kind of attention. Every slot takes as much memory as the longest
    slot.

    Each slot has a *place* in the slabs. Places are consecutive, so a batch is a view of the slabs. When a slot is
    released, the slot at the last place moves to its place. Growing doubles the capacity and copies all slots.
    """

    rectangle = True
    growth = 2.0

    def __init__(self, *args: Any) -> None:
        """See `SlabCache`."""
        super().__init__(*args)
        self._slabs = self._new_slabs()
        self._places: dict[int, int] = {}
        """Taken slot -> its place."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """One slab per kind of attention."""
        return self._slabs

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        for slab in self.slabs:
            if slab.places == len(self._places):
                capacity = self._fits(slab, self.initial_capacity)
                slab.resize(max(1, 2 * slab.places), capacity, max(self._tops.values(), default=0))
        slot = super(SlabCache, self).acquire(prompt, adapter, lag)
        self._places[slot], self._tops[slot] = len(self._places), 0
        return slot

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        if slot in self._places:
            place, last = self._places[slot], len(self._places) - 1
            moved = next(other for other, at in self._places.items() if at == last)
            for slab in self.slabs:
                if place != last:
                    slab.copy(slab, last, place, max(self._tops[slot], self._tops[moved]))
            # Assign all places in one step, after the copies. If an interrupt comes before or after it, every slot has
            # one place.
            self._places = {other: at for other, at in {**self._places, moved: place}.items() if other != slot}
            for slab in self.slabs:
                # A failed request may have left NaN here. The next slot at this place must not read NaN from a masked
                # column.
                slab.clear(last, self._tops[moved])
        super().release(slot)
        if not self._places:
            # Free the memory when the cache is idle. Otherwise, one long text or large batch would hold it forever.
            for slab in self.slabs:
                slab.resize(0, 0, 0)

    def _groups(self, slots: Sequence[int]) -> list[SlotGroup]:
        return [SlotGroup(self.slabs, range(len(slots)), [self._places[slot] for slot in slots])]

    def _reserve(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        used = max(self._tops.values())
        for slab in self.slabs:
            capacity = self._fits(slab, max(ends))
            if capacity != slab.capacity:
                slab.resize(len(self._places), capacity, used)
        for slot, end in zip(slots, ends, strict=True):
            self._tops[slot] = max(self._tops[slot], end)
