"""The slab cache for CUDA devices. Rows are stored in the order of their numbers, and attention reads the description
of a pass from tensors on the device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.attention import BLOCK, LayerAttention, passed_by
from paceline.cache.shared import SharedSlabCache
from paceline.kernels.cuda.table import RowTable
from paceline.types import DraftBudget, Forward, Rows

Replay = Callable[[], Forward]
"""A function that runs a recorded pass on the current contents of its table."""


class DeviceCache(SharedSlabCache):
    """A `SharedSlabCache` whose passes read lengths and places from the device, so that the same graph serves all
    lengths.

    Graphs contain memory addresses. So the cache keeps its memory as long as it exists, and drops its graphs when a
    slab or the decoder's table of rotary factors moves (`RotarySet.reserve`).

    Attributes:
        graphs: The graphs that `DeviceDecoder` has recorded, by the size of the pass.
        passes: Number of passes so far, by the size of the pass.
        reach: Position up to which the rotary factors were computed when the graphs were recorded.
    """

    initial_capacity = 2048
    """Capacity of a new slab. When a slab grows, its graphs are dropped, so slabs are larger at the start than on a
    CPU."""

    def __init__(self, *args: Any) -> None:
        """See `SharedSlabCache`."""
        super().__init__(*args)
        self.graphs: dict[Hashable, tuple[RowTable, Replay]] = {}
        self.passes: Counter[Hashable] = Counter()
        self.reach = 0
        self._addresses: list[tuple[int, torch.Size]] = []
        self._spare: int | None = None

    def acquire(self, prompt: int = 0, adapter: int = 0, lag: int = 0) -> int:
        """Acquire a slot. The first place belongs to a spare slot, to which the padding slots of a graph write."""
        if self._spare is None:
            self._spare = super().acquire()
        return super().acquire(prompt, adapter, lag)

    def release(self, slot: int) -> None:
        """Release a slot. A call for the spare slot is ignored, because after an error an engine releases every slot
        that no request holds."""
        if slot != self._spare:
            super().release(slot)

    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        """Return the budget, limited only to the `BLOCK` rows for which a ring has room.

        A row's bits do not depend on block boundaries here.
        """
        self.check_taken(slot)
        return budget.within(budget.depth, BLOCK - 1)

    def begin(self, rows: Rows) -> DevicePass:  # type: ignore[override]
        """Begin a pass over these rows without a graph."""
        slots, count = rows.tokens.shape
        table = RowTable(slots, count, max(rows.starts) + count, rows.tokens.device)
        places = self.places(rows, count)
        table.fill(rows, places)
        prompt = (places[0], rows.lengths[0]) if rows.prefill and slots == 1 else None
        return self.over(table, prompt)

    def places(self, rows: Rows, count: int) -> list[int]:
        """Make room for `count` rows in each slot of a pass, and return the places of these slots.

        Raises:
            OutOfMemory: If the slabs cannot grow that far.
        """
        self.note_pass(rows)
        ends = [length + start + count for length, start in zip(rows.lengths, rows.starts, strict=True)]
        self._reserve(rows.slots, ends)
        addresses = [(x.data_ptr(), x.shape) for slab in self.slabs for x in slab.tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self.graphs.clear()
        return [self._places[slot] for slot in rows.slots]

    def over(self, table: RowTable, prompt: tuple[int, int] | None = None) -> DevicePass:
        """Return a pass. When it runs, it reads the contents that the table has at that time.

        Args:
            table: The rows of the pass.
            prompt: Place and length of the slot, if these rows continue its prompt. Any kernel may then be used.

        Returns:
            A pass that is valid until a slab moves.
        """
        return DevicePass(self, table, prompt)

    def _columns(self, rows: Rows, index: int) -> Sequence[int]:
        # Restore `SlotTable._columns`, which `SlabCache` overrides: here, rows are stored in the order of their
        # numbers.
        return range(len(rows.parents[index]))


class DevicePass:
    """One forward pass over a `DeviceCache` (`protocols.Pass`). It reads the table when it runs."""

    def __init__(self, cache: DeviceCache, table: RowTable, prompt: tuple[int, int] | None) -> None:
        """See `DeviceCache.over`."""
        self._table, self._prompt = table, prompt
        slabs = [(slab.tensors[0], slab.tensors[-1], _targets(slab.tensors[0], table)) for slab in cache.slabs]
        self._layers = [
            (slabs[slab][0][index], slabs[slab][1][index], slabs[slab][2], layer)
            for layer, (slab, index) in zip(cache._layers, cache._indices, strict=True)
            if layer
        ]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values [B, T, kv_heads, D] without computing attention, for rows that only later passes
        read."""
        keys, values, targets, _ = self._layers[layer]
        for slab, x in ((keys, k), (values, v)):
            slab.view(-1, slab.shape[-1]).index_copy_(0, targets, x.reshape(-1, x.shape[-1]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self.write(layer, k, v)
        return self.look(layer, q)

    def look(self, layer: int, q: Tensor) -> Tensor:
        """See `protocols.SharedPass.look`."""
        keys, values, _, spec = self._layers[layer]
        if self._prompt is None or spec.softcap is not None or spec.sinks is not None:
            return attend(q, keys, values, self._table, spec)
        return _attend_prompt(q, keys, values, *self._prompt, spec)


def _targets(slab: Tensor, table: RowTable) -> Tensor:
    """Return the lines that a pass writes in a layer [places * kv_heads * capacity, D], int64 [B * T * kv_heads]."""
    _, _, kv, capacity, _ = slab.shape
    row = torch.arange(table.rows, device=slab.device)
    column = ((table.lengths + table.starts)[:, None] + row) % capacity
    head = (table.places.long()[:, None] * kv + torch.arange(kv, device=slab.device)) * capacity
    return (column[:, :, None] + head[:, None]).flatten()


def attend(q: Tensor, keys: Tensor, values: Tensor, table: RowTable, spec: LayerAttention) -> Tensor:
    """Compute attention of each row over its slot's committed prefix, its ancestors and itself.

    The keys and values of these rows must already be stored. On CUDA a Triton kernel runs, and elsewhere
    `reference`.

    Args:
        q: [B, T, heads, D].
        keys: [places, kv_heads, capacity, D], one layer of a slab, with position p in column p % capacity.
        values: Values, in the same shape as `keys`.
        table: The rows of the pass.
        spec: Kind of attention of the layer.

    Returns:
        [B, T, heads * D].
    """
    unsupported = spec.sinks is not None or spec.single or spec.chunked
    if q.device.type != "cuda" or unsupported:
        return reference(q, keys, values, table, spec)
    from paceline.kernels.cuda.kernels import tree_attention

    return tree_attention(q, keys, values, table, spec)


def reference(q: Tensor, keys: Tensor, values: Tensor, table: RowTable, spec: LayerAttention) -> Tensor:
    """Compute the same as `attend` with masked matrix multiplications over the whole slab.

    No shape depends on a length, so a graph can record it.
    """
    b, t, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    group_size = heads // keys.shape[1]
    k, v = (x[table.places.long()].to(wide).repeat_interleave(group_size, 1) for x in (keys, values))
    scores = q.to(wide).transpose(1, 2) @ k.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = ~visible(table, keys.shape[2], spec.window, spec.chunked)[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.to(wide).view(1, heads, 1, 1).expand(b, heads, t, 1)], -1)
    out = scores.softmax(-1)[..., : keys.shape[2]] @ v
    return out.transpose(1, 2).reshape(b, t, -1).to(q.dtype)


def visible(table: RowTable, capacity: int, window: int | None, chunked: bool = False) -> Tensor:
    """Return the columns that each row attends to, bool [B, T, capacity]."""
    lengths, depths, paths = table.lengths.long(), table.depths.long(), table.paths.long()
    here = (lengths[:, None] + depths)[..., None]
    nearest = passed_by(here, window, chunked) if window else torch.full_like(here, -1)
    last = lengths[:, None] - 1
    # A column holds the last position before `length` that maps to it.
    prefix = (last - (last - torch.arange(capacity, device=lengths.device)) % capacity)[:, None]
    visible_prefix = (prefix >= 0) & (prefix > nearest)
    depth = torch.arange(table.reach, device=lengths.device)
    there = lengths[:, None, None] + depth
    attended = (depth <= depths[..., None]) & (there > nearest)
    columns = torch.where(attended, (lengths[:, None, None] + paths) % capacity, capacity)
    # The rows may have overwritten columns of the prefix. A ring is long enough that these columns have left the
    # window.
    return torch.cat([visible_prefix, visible_prefix[..., :1]], -1).scatter(2, columns, True)[..., :capacity]


def _attend_prompt(q: Tensor, keys: Tensor, values: Tensor, place: int, length: int, spec: LayerAttention) -> Tensor:
    """Compute the attention of a prompt chunk with torch's fastest kernel. This is possible because a chunk never
    depends on a draft."""
    _, t, heads, d = q.shape
    begin = max(0, length + 1 - spec.window) if spec.window else 0
    column = torch.arange(begin, length + t, device=q.device)
    here = torch.arange(length, length + t, device=q.device)[:, None]
    mask = column <= here
    if spec.window:
        mask &= column > passed_by(here, spec.window, spec.chunked)
    k, v = (x[place].index_select(1, column % x.shape[2])[None] for x in (keys, values))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, mask, scale=spec.scale, enable_gqa=heads != keys.shape[1]
    )
    return out.transpose(1, 2).reshape(1, t, heads * d)
