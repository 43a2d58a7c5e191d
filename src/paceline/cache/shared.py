"""A KV cache whose slots lie side by side, for devices where one call for all slots of a pass is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.cache.slab import Slab, SlabCache, SlotGroup


class SharedSlabCache(SlabCache):
    """A `SlabCache` with one slab per kind of attention for all slots, each as long as the longest.

    Slots lie side by side (a slot's *place*), so that a batch is a view: when one is released, the last takes its
    place. Growth doubles and copies all of them.
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
        """One per kind of attention."""
        return self._slabs

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0) -> int:
        for slab in self.slabs:
            if slab.places == len(self._places):
                capacity = self._fits(slab, self.initial_capacity)
                slab.resize(max(1, 2 * slab.places), capacity, max(self._tops.values(), default=0))
        slot = super(SlabCache, self).acquire(prompt, adapter)
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
            # All slabs have moved: one assignment, so that an interrupt leaves each slot in one place.
            self._places = {other: at for other, at in {**self._places, moved: place}.items() if other != slot}
            for slab in self.slabs:
                # So that a shorter neighbour meets no NaN of a request that failed.
                slab.clear(last, self._tops[moved])
        super().release(slot)
        if not self._places:
            # What one long text or one wide batch needed is not held for the next.
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
