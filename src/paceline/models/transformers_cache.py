"""A KV cache for transformers models, which run their own attention on it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from paceline.cache.slots import SlotTable
from paceline.protocols import Saved
from paceline.types import DraftBudget, Rows

_INITIAL_CAPACITY = 128
"""Number of positions for which a new layer has room. The capacity doubles when a text exceeds it."""


@dataclass(slots=True)
class _PassWindow:
    """The slots and positions of the current pass. Slot `slots[b]` is written from position `starts[b]`, and is read up
    to position `end`. `places` is the number of existing slots."""

    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    end: int = 0
    places: int = 0


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of the cache, for all slots. `keys` and `values` are [places, kv_heads, capacity, D].

    The model writes through `update`, which returns the part that the pass may read. Columns after a slot's end may
    hold stale data, which the mask hides.
    """

    def __init__(self, window: _PassWindow) -> None:
        super().__init__()
        self._window = window

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.room(key_states, value_states)
        count = key_states.shape[2]
        for row, (slot, start) in enumerate(zip(self._window.slots, self._window.starts, strict=True)):
            self.keys[slot, :, start : start + count] = key_states[row]
            self.values[slot, :, start : start + count] = value_states[row]
        return self._seen(self.keys), self._seen(self.values)

    def room(self, keys: Tensor, values: Tensor) -> None:
        """Make room for all slots up to the end of the pass. The sizes are taken from `keys` and `values` [*, kv_heads,
        *, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.keys, self.values = (x.new_empty(0, x.shape[1], 0, x.shape[3]) for x in (keys, values))
        if self.keys.shape[0] < self._window.places or self.keys.shape[2] < self._window.end:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def get_seq_length(self) -> int:
        """Return the length for models without position ids, which run one slot at a time."""
        return max(self._window.starts, default=0)

    def _grown(self, old: Tensor) -> Tensor:
        places, heads, capacity, size = old.shape
        room = capacity if capacity >= self._window.end else max(_INITIAL_CAPACITY, 2 * capacity, self._window.end)
        # Fill the new room with zeros: a masked column has weight 0, but 0 times an uninitialised value may be NaN.
        new = old.new_zeros(self._window.places, heads, room, size)
        new[:places, :, :capacity] = old
        return new

    def _seen(self, all_slots: Tensor) -> Tensor:
        slots, end = self._window.slots, self._window.end
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return all_slots[slots[0] : slots[0] + len(slots), :, :end]
        return all_slots[:, :, :end][list(slots)]


class SlotCache(SlotTable):
    """A `KVCache` for transformers models. Row r of a slot's pass is stored at position `length + r`.

    Every layer stores all positions. If it has a sliding window, the mask hides older positions. Rejected rows can
    therefore simply be overwritten.
    """

    rectangle = True

    def __init__(self, trees: bool) -> None:
        """`trees`: True if the model can verify trees, False if it can verify only chains."""
        super().__init__()
        self._trees = trees
        self._window = _PassWindow()
        self._model_cache = Cache(layer_class_to_replicate=partial(_SlotLayer, self._window))

    @torch.inference_mode()
    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        slot = super().acquire(prompt, adapter, lag)
        for side in self._sides():
            if slot < len(side):
                # A failed request may have left NaN here. A pass would read it if another slot of the batch is longer.
                side[slot].zero_()
        return slot

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """See `protocols.KVCache.fork`."""
        self.check_taken(slot)
        new, length = self.acquire(self.prompts[slot], self.adapters[slot]), self.lengths[slot]
        self._window.places = len(self.lengths)
        for layer in self._layers():
            layer.room(layer.keys, layer.values)
        for side in self._sides():
            side[new, :, :length] = side[slot, :, :length]
        self.lengths[new] = length
        return new

    @torch.inference_mode()
    def save(self, slot: int) -> Saved:
        """See `protocols.KVCache.save`.

        Any prefix can be loaded. Every layer stores all positions, and rotary factors do not depend on the prompt's
        length, because the context ends before they change.
        """
        self.check_taken(slot)
        length = self.lengths[slot]
        return Saved(length, tuple(side[slot, :, :length].clone() for side in self._sides()) if length else ())

    @torch.inference_mode()
    def load(self, slot: int, saved: Saved, length: int) -> int:
        """See `protocols.KVCache.load`."""
        layers = self._model_cache.layers
        if not (length := saved.most(length, self.prompts[slot])):
            return 0
        self._window.places, self._window.end = len(self.lengths), length
        layers += [_SlotLayer(self._window) for _ in saved.tensors[2 * len(layers) :: 2]]
        pairs = zip(saved.tensors[::2], saved.tensors[1::2], strict=True)
        for layer, (keys, values) in zip(layers, pairs, strict=True):
            layer.room(keys[None], values[None])
            layer.keys[slot, :, :length] = keys[:, :length]
            layer.values[slot, :, :length] = values[:, :length]
        self.lengths[slot] = length
        return length

    def truncate(self, slot: int, length: int) -> None:
        """See `protocols.KVCache.truncate`."""
        self.check_length(slot, length)
        self.lengths[slot] = length

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Return the budget. It is reduced to a chain if the model's attention does not accept tree masks."""
        return budget if self._trees else DraftBudget.chain(budget.depth)

    def begin(self, rows: Rows) -> Cache:
        """Return the cache that the model takes as `past_key_values`."""
        self.note_pass(rows)
        self._window.slots = rows.slots
        self._window.starts = tuple(map(operator.add, rows.lengths, rows.starts))
        self._window.end = rows.end
        self._window.places = len(self.lengths)
        return self._model_cache

    def _move(self, slot: int, source: list[int], target: list[int]) -> None:
        for side in self._sides():
            side[slot][:, target] = side[slot][:, source]

    def _layers(self) -> list[_SlotLayer]:
        return [layer for layer in self._model_cache.layers if layer.is_initialized]

    def _sides(self) -> list[Tensor]:
        """Return the keys and the values of each layer."""
        return [side for layer in self._layers() for side in (layer.keys, layer.values)]
