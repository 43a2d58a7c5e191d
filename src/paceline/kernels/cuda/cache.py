"""The slab cache of a CUDA device: rows lie in a chain, and what a pass must know of them lies on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.attention import BLOCK, LayerAttention
from paceline.cache.slab import SlabCache
from paceline.kernels.cuda.attention import attend
from paceline.kernels.cuda.table import RowTable
from paceline.types import DraftBudget, Forward, Rows

Replay = Callable[[], Forward]
"""Runs a recorded pass over what stands in its table by now."""


class DeviceCache(SlabCache):
    """A `SlabCache` whose passes read lengths and places from the device, so that one graph serves all lengths.

    `graphs`: what `DeviceDecoder` has recorded, by size of pass; `met`: how often each size came up. Graphs hold
    addresses: memory is kept until the cache itself goes, and they are forgotten where a slab moves.
    """

    first = 2048
    """A graph lasts until its slab grows, so slabs begin larger than on a CPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs: dict[Any, tuple[RowTable, Replay]] = {}
        self.met: Counter[Any] = Counter()
        self._addresses: list[Any] = []
        self._spare: int | None = None

    def acquire(self, prompt: int = 0) -> int:
        """The first place is taken by a slot that nobody owns: the slots that fill up a graph's lie there."""
        if self._spare is None:
            self._spare = super().acquire()
        return super().acquire(prompt)

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """All of it: a row's bits do not depend on where blocks end. A ring has room for `BLOCK` rows."""
        return budget.within(budget.depth, BLOCK - 1)

    def begin(self, rows: Rows) -> DevicePass:  # type: ignore[override]
        """A pass of just these rows, outside any graph."""
        slots, count = rows.tokens.shape
        reach = max(rows.starts) + count
        table = RowTable(slots, count, reach, rows.tokens.device)
        places = self.places(rows, count)
        table.fill(rows, places)
        prompt = (places[0], rows.lengths[0]) if rows.prefill and slots == 1 else None
        return DevicePass(self, self._layers, table, prompt)

    def places(self, rows: Rows, count: int) -> list[int]:
        """Where the slots of a pass lie, with room for `count` rows each. Raises `OutOfMemory`."""
        self._home.update((slot, tuple(range(len(x)))) for slot, x in zip(rows.slots, rows.parents, strict=True))
        ends = [length + start + count for length, start in zip(rows.lengths, rows.starts, strict=True)]
        self._reach(rows.slots, ends)
        addresses = [(x.data_ptr(), x.shape) for slab in self.slabs for x in slab.tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self.graphs.clear()
        return [self._places.index(slot) for slot in rows.slots]

    def over(self, table: RowTable) -> DevicePass:
        """A pass by what will stand in a table whenever it runs. It holds until a slab moves."""
        return DevicePass(self, self._layers, table)


class DevicePass:
    """One forward pass over a `DeviceCache` (`protocols.Pass`), by what stands in a table when it runs."""

    def __init__(
        self,
        cache: DeviceCache,
        layers: Sequence[LayerAttention],
        table: RowTable,
        prompt: tuple[int, int] | None = None,
    ) -> None:
        """`prompt`: place and length of the slot whose prompt these rows continue; any kernel may serve them."""
        self._table, self._prompt = table, prompt
        order = list(dict.fromkeys(layer.kind for layer in layers))
        counts = [0] * len(order)
        self._layers: list[tuple[Tensor, Tensor, Tensor, LayerAttention]] = []
        lines = [_lines(slab.tensors[0], table) for slab in cache.slabs]
        for layer in layers:
            kind = order.index(layer.kind)
            keys, values = (x[counts[kind]] for x in cache.slabs[kind].tensors)
            self._layers.append((keys, values, lines[kind], layer))
            counts[kind] += 1

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values [B, T, kv_heads, D] of rows that only later passes look at: the first half of `attend`."""
        keys, values, lines, _ = self._layers[layer]
        for slab, x in ((keys, k), (values, v)):
            slab.view(-1, slab.shape[-1]).index_copy_(0, lines, x.reshape(-1, x.shape[-1]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self.write(layer, k, v)
        keys, values, _, how = self._layers[layer]
        if self._prompt is None or how.softcap is not None:
            return attend(q, keys, values, self._table, how)
        return _attend_prompt(q, keys, values, *self._prompt, how)


def _lines(slab: Tensor, table: RowTable) -> Tensor:
    """The lines of a layer [places * kv_heads * capacity, D] that a pass writes, int64 [B * T * kv_heads]."""
    _, _, kv, capacity, _ = slab.shape
    row = torch.arange(table.rows, device=slab.device)
    column = ((table.lengths + table.starts)[:, None] + row) % capacity
    head = (table.places.long()[:, None] * kv + torch.arange(kv, device=slab.device)) * capacity
    return (column[:, :, None] + head[:, None]).flatten()


def _attend_prompt(q: Tensor, keys: Tensor, values: Tensor, place: int, length: int, how: LayerAttention) -> Tensor:
    """A prompt is cut into the same chunks whatever is drafted, so the fastest kernel will do."""
    _, t, heads, d = q.shape
    begin = max(0, length + 1 - how.window) if how.window else 0
    column = torch.arange(begin, length + t, device=q.device)
    here = torch.arange(length, length + t, device=q.device)[:, None]
    seen = column <= here
    if how.window:
        seen &= column > here - how.window
    k, v = (x[place].index_select(1, column % x.shape[2])[None] for x in (keys, values))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, seen, scale=how.scale, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(1, t, heads * d)
