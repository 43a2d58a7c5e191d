"""Attention over the slab cache: which columns a row sees, and sums whose bits depend on nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.layout import Layout
from paceline.types import Rows

BLOCK = 512
"""Columns whose weighted values are summed by one product. A longer product would be split according to its length, and
a row would get other bits when more rows travel with it; these blocks begin at fixed positions."""


_ROWS = 64
"""Rows whose scores are held at a time: those of a prompt's chunk would take a gigabyte after a long text."""


Kind = tuple[int | None, bool, tuple[int, int] | None, int, bool, bool]
"""Properties that the layers of one slab share: see `LayerAttention`."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one layer: scores times `scale`, then cap * tanh(scores / cap) if there is a `softcap`; a row sees
    the last `window` positions, its own included (None: all). `mutual`: rows of one pass see each other, the later ones
    too (a drafted block). `sinks` [heads]: the score, in the softmax alone, of a column without a value (gpt-oss).
    `heads`: number and size of its key heads, where they are not the cache's. `source`: the layer whose keys and values
    it sees, if it has none of its own. `part`: number of the device's part of the model (`models/placement.py`).
    `single`: its keys are its values too, and are held once. `chunked`: the window begins at a
    multiple of its width."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    mutual: bool = False
    sinks: Tensor | None = field(default=None, compare=False)
    heads: tuple[int, int] | None = None
    source: int | None = None
    part: int = 0
    single: bool = False
    chunked: bool = False

    @property
    def kind(self) -> Kind:
        """Layers of one kind share a slab, and what a row sees in it."""
        return self.window, self.mutual, self.heads, self.part, self.single, self.chunked


def slab_indices(layers: Sequence[LayerAttention | None]) -> list[tuple[int, int]]:
    """For each layer its slab, numbered in the order in which the kinds first appear, and its index in that slab; (-1,
    -1) for one that does not attend."""
    kinds = list(dict.fromkeys(layer.kind for layer in layers if layer))
    numbers = [itertools.count() for _ in kinds]
    found: list[tuple[int, int]] = []
    for layer in layers:
        if layer is None:
            found.append((-1, -1))
        elif layer.source is not None:
            found.append(found[layer.source])
        else:
            slab = kinds.index(layer.kind)
            found.append((slab, next(numbers[slab])))
    return found


class SlabPlan:
    """The slab columns that rows of some of a pass's slots are written to, and those that each row attends to."""

    def __init__(
        self,
        slabs: tuple[Tensor, ...],
        window: int | None,
        rows: Rows,
        members: Sequence[int],
        places: Sequence[int],
        layouts: Sequence[Layout],
        chunked: bool = False,
    ) -> None:
        """`members`: indices of the slots in the pass, one or all; `places`, `layouts`: of each, its place in the slabs
        [layers, places, kv_heads, capacity, D], of keys and of values or one of both, and its layout. `chunked`: see
        `LayerAttention`."""
        self._chunked = chunked
        self.slabs, self.window, self.rows = slabs, window, rows
        self.members, self.places, self.layouts = list(members), list(places), layouts
        self.lengths = [rows.lengths[i] for i in self.members]
        self.count = max(rows.counts[i] for i in self.members)
        ends = [length + x.visible.shape[1] for length, x in zip(self.lengths, layouts, strict=True)]
        self.reach = min(max(ends), slabs[0].shape[3])
        # Before the tail of the shortest slot every row sees every column, as long as no window has moved on.
        self._moved = window is not None and max(ends) > window
        self.seen = 0 if self._moved else min(self.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """[B, T, reach - seen], added to the scores of the columns from `seen` on."""
        keys = self.slabs[0]
        if self._moved and self.window:
            span = self.window, self._chunked
            mask = _window_mask(self.count, self.lengths, self.layouts, span, keys.shape[3], self.reach)
        else:
            mask = _mask(self.count, self.lengths, self.layouts, self.seen, self.reach)
        return mask.to(keys.device, torch.float64 if keys.dtype == torch.float64 else torch.float32)

    @cached_property
    def _writes(self) -> _SlabWrites:
        device, (_, _, kv, capacity, head_dim) = self.slabs[0].device, self.slabs[0].shape
        stores, copies, of = list[tuple[int, int]](), list[tuple[int, int]](), self.rows.tokens.shape[1]
        for i, place, length, x in zip(self.members, self.places, self.lengths, self.layouts, strict=True):
            entries = [place * kv * capacity + (length + column) % capacity for column in range(len(x.rows))]
            stores += [(entries[column], i * of + row) for column, row in x.stores.tolist()]
            copies += [(entries[column], entries[source]) for column, source in x.copies.tolist()]
        # The slab seen as [places * kv_heads * capacity, D]: one store for all slots of a layer.
        heads = torch.arange(kv, device=device) * capacity
        targets, copy_targets, copy_sources = (
            (torch.tensor(column, dtype=torch.long, device=device)[:, None] + heads).flatten()
            for column in ([to for to, _ in stores], [to for to, _ in copies], [source for _, source in copies])
        )
        wanted = [row for _, row in stores]
        in_order = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        sources = slice(wanted[0], wanted[-1] + 1) if in_order else torch.tensor(wanted, device=device)
        flat = [s.view(len(s), -1, head_dim).unbind(0) for s in self.slabs]
        return _SlabWrites(targets, sources, copy_sources, copy_targets, flat)

    @cached_property
    def _views(self) -> list[tuple[Tensor, ...]] | None:
        """Keys and values by layer, each [B * kv_heads, reach, D], where the slots lie side by side in order."""
        first, end = self.places[0], self.places[0] + len(self.places)
        if self.places != list(range(first, end)):
            return None
        return [slab[:, first:end, :, : self.reach].flatten(1, 2).unbind(0) for slab in self.slabs]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [B, T, kv_heads, D] of all slots of the pass; a slab for native layers may pad D."""
        x, spare = self._writes, self.slabs[0].shape[-1] - k.shape[-1]
        for flat, new in zip(x.flat, (k, v), strict=False):  # where values are keys, these are stored
            new = new.flatten(0, 1)[x.sources]
            if spare:
                new = F.pad(new, (0, spare))
            if len(x.copy_sources):
                flat[layer].index_copy_(0, x.copy_targets, flat[layer][x.copy_sources])
            flat[layer].index_copy_(0, x.targets, new.reshape(-1, new.shape[-1]))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots, each [B * kv_heads, reach, D]."""
        if self._views:
            found = [view[layer] for view in self._views]
        else:
            found = [slab[layer, self.places, :, : self.reach].flatten(0, 1) for slab in self.slabs]
        return found[0], found[-1]

    def queries(self, q: Tensor) -> Tensor:
        """Of the pass's queries [B, T, heads, D] those of these slots' rows."""
        if len(self.members) < len(q):
            q = q[self.members]
        return q[:, : self.count]


class SlabPass:
    """One forward pass over a `SlabCache` (`protocols.Pass`)."""

    def __init__(
        self,
        plans: Sequence[Sequence[SlabPlan]],
        layers: Sequence[LayerAttention | None],
        indices: Sequence[tuple[int, int]],
        prefill: bool,
    ) -> None:
        """`plans`: for each kind of attention those of the pass's slots, in their order. `indices`: `slab_indices` of
        the layers."""
        self.plans, self._layers, self._indices, self._prefill = plans, layers, indices, prefill

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of rows that only later passes look at: the first half of `attend`."""
        slab, index = self._indices[layer]
        for plan in self.plans[slab]:
            plan.write(index, k, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self.write(layer, k, v)
        return self.look(layer, q)

    def look(self, layer: int, q: Tensor) -> Tensor:
        """See `protocols.SharedPass.look`."""
        slab, index = self._indices[layer]
        spec = self._layers[layer]
        assert spec
        return torch.cat([self._look(plan, index, spec, q) for plan in self.plans[slab]])

    def _look(self, plan: SlabPlan, index: int, spec: LayerAttention, q: Tensor) -> Tensor:
        """The slots of one plan. Those of the pass's queries that are not theirs are left out."""
        keys, values = plan.read(index)
        own, padding = plan.queries(q), q.shape[1] - plan.count
        if self._prefill and spec.softcap is None and spec.sinks is None:
            mixed = _fast(own, keys, values, plan, spec)
        else:
            parts = enumerate(own.split(_ROWS, 1))
            mixed = torch.cat([_exact(x, keys, values, plan, spec, i * _ROWS) for i, x in parts], 1)
        # Padding repeats the first row's token: with its mix too, it chooses the same experts, and no others are read.
        return torch.cat([mixed, mixed[:, :1].expand(-1, padding, -1)], 1) if padding else mixed


def _fast(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, spec: LayerAttention) -> Tensor:
    """Attention of a prompt's chunks, which are the same whatever is drafted, by the fastest kernel."""
    b, t, heads, d = q.shape
    keys, values = (x.view(b, -1, plan.reach, d) for x in (keys, values))
    mask = F.pad(plan.mask, (plan.seen, 0)).to(q.dtype)[:, None]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=spec.scale, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(b, t, heads * d)


def _exact(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, spec: LayerAttention, first: int = 0) -> Tensor:
    """Attention whose bits do not depend on what lies between a row's ancestors, or on the other rows. `first`: the
    pass's row that q begins with.

    The softmax is taken apart so that no order of columns changes its sum: weights of 8 bits add up exactly in float64.
    """
    b, t, heads, d = q.shape
    kv = len(keys) // b
    group = heads // kv
    # The query heads that share a key head become rows of one product. Keys stand on its left: that side is read in
    # place, while the other, here the few queries, is packed first.
    queries = (q * spec.scale).view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
    scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
    scores = scores.to(plan.mask.dtype, memory_format=torch.contiguous_format)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores.view(b, kv, group, t, -1)[..., plan.seen :].add_(plan.mask[:, None, None, first : first + t])
    # 512 values under weights of up to 1 may pass float16's range.
    summed = torch.float32 if keys.dtype == torch.float16 else keys.dtype
    top = scores.amax(-1, keepdim=True)
    if spec.sinks is not None:
        sinks = spec.sinks.to(top.dtype).view(kv, group, 1).expand(b, kv, group, t).reshape(b * kv, group * t, 1)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_().to(summed)
    wide = plan.mask.dtype if weights.device.type == "mps" else torch.float64
    total = weights.sum(-1, keepdim=True, dtype=wide).to(plan.mask.dtype)
    if spec.sinks is not None:
        total += (sinks - top).exp_()
    mixed = _mix(weights, values.to(summed), plan.mask.dtype).div_(total)
    mixed = mixed.view(b, kv, group, t, d).permute(0, 3, 1, 2, 4)
    return mixed.to(q.dtype, memory_format=torch.contiguous_format).reshape(b, t, heads * d)


def _mix(weights: Tensor, values: Tensor, precise: torch.dtype) -> Tensor:
    """Weighted sum of values [B kv, columns, D] by blocks: whole blocks in one product, added in order."""
    reach = values.shape[1]
    blocks, rest = divmod(reach, BLOCK)
    if not blocks:
        return torch.bmm(weights, values).to(precise)
    end = reach - rest
    left = weights[..., :end].unflatten(2, (blocks, BLOCK)).transpose(1, 2)
    parts = torch.matmul(left, values[:, :end].unflatten(1, (blocks, BLOCK))).unbind(1)
    total = parts[0].to(precise)
    for part in parts[1:]:
        total += part
    if rest:
        total += torch.bmm(weights[..., end:], values[:, end:])
    return total


@dataclass(frozen=True, slots=True)
class _SlabWrites:
    """Entries [places * kv_heads * capacity] of a layer of the slab that a pass writes, over all key heads: `targets`
    get the rows `sources` [B * T], after `copy_targets` have got what earlier passes left at `copy_sources`. `flat`:
    keys and values [entries, D] of each layer."""

    targets: Tensor
    sources: slice | Tensor
    copy_sources: Tensor
    copy_targets: Tensor
    flat: list[tuple[Tensor, ...]]


def _mask(count: int, lengths: Sequence[int], layouts: Sequence[Layout], first: int, reach: int) -> Tensor:
    """Mask [B, count, reach - first]: 0 for the prefix and the visible columns, -inf elsewhere."""
    mask = torch.zeros(len(layouts), count, reach - first)
    for slot, x, length in zip(mask, layouts, lengths, strict=True):
        tail = slot[:, length - first :]
        tail[:, 1:] = -torch.inf  # padding rows see the first column
        tail[: len(x.visible)] = -torch.inf
        tail[: len(x.visible), : x.visible.shape[1]].masked_fill_(x.visible, 0.0)
    return mask


def _window_mask(
    count: int, lengths: Sequence[int], layouts: Sequence[Layout], span: tuple[int, bool], capacity: int, reach: int
) -> Tensor:
    """Mask [B, count, reach] for a window that has moved on, over a ring that may have wrapped. `span`: its width, and
    whether it begins at a multiple of that."""
    window, chunked = span
    mask = torch.zeros(len(layouts), count, reach)
    for slot, length, x in zip(mask, lengths, layouts, strict=True):
        here = length + x.row_depths[:, None]
        passed = passed_by(here, window, chunked)
        # The prefix position held by each column: the last one before `length` that falls on it.
        columns = torch.arange(reach)
        prefix = length - 1 - (length - 1 - columns) % capacity
        visible = (prefix >= 0) & (prefix > passed)
        tail = (length + torch.arange(x.visible.shape[1])) % capacity
        visible[:, tail] = x.visible & (length + x.column_depths > passed)
        slot[: len(visible)].masked_fill_(~visible, -torch.inf)
    return mask


def passed_by(here: Tensor, window: int, chunked: bool) -> Tensor:
    """The last positions that rows at positions `here` do not see any more."""
    return here - (here % window + 1 if chunked else window)
