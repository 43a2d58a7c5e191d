"""Attention over the slab cache. The bits of a row's result depend only on the columns that the row attends to.

A *column* is where a slab (`slab.Slab`) stores the keys and values of one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.kv_types import from_stored, to_stored
from paceline.cache.layout import Layout
from paceline.types import Rows

BLOCK = 512
"""Number of columns over which one matrix multiplication sums attention weights times values.

Libraries split longer sums in a way that depends on their length. A row's bits would then change with the number of
rows in the pass. Blocks therefore always begin at multiples of `BLOCK`.
"""


_ROWS = 64
"""Number of rows whose scores are computed at a time. After a long text, the scores of a whole prompt chunk would take
a gigabyte."""


Kind = tuple[int | None, bool, tuple[int, int] | None, int, bool, bool]
"""The properties that all layers of a slab share (see `LayerAttention.kind`)."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Properties of one layer's attention.

    Attributes:
        scale: Factor of the scores.
        window: Number of positions that a row attends to, including its own. None for all positions.
        softcap: If set, scores become softcap * tanh(scores / softcap).
        mutual: True if rows also attend to later rows of the same pass (a drafted block).
        sinks: Attention sinks, [heads] (gpt-oss). Each is a score that takes part in the softmax but has no value.
        heads: Number and size of the key heads, if they differ from the cache's defaults.
        source: Index of the layer whose keys and values this layer reads, if it has none of its own.
        part: Index of the part of the model that contains this layer (`models/placement.py`). Each part is on one
            device.
        single: True if the keys also serve as values, so that they are stored only once.
        chunked: True if windows begin at multiples of `window` (chunked attention).
        kernel: Computes the attention (`kernels.cpu.attention.attend`). None if torch computes it.
    """

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
    kernel: Callable[..., Tensor] | None = field(default=None, compare=False)

    @property
    def kind(self) -> Kind:
        """The properties that decide which slab stores the layer, and which of its columns a row attends to."""
        return self.window, self.mutual, self.heads, self.part, self.single, self.chunked


def slab_indices(layers: Sequence[LayerAttention | None]) -> list[tuple[int, int]]:
    """Return where each layer's keys and values are stored.

    Args:
        layers: Attention of each layer. None for a layer without attention.

    Returns:
        For each layer, the index of its slab and the layer's index in that slab, or (-1, -1) for a layer without
        attention. Slabs are numbered in the order of first use.
    """
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
    """The columns of one slab that a pass writes and reads, for the slots that the slab holds."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        window: int | None,
        rows: Rows,
        members: Sequence[int],
        places: Sequence[int],
        layouts: Sequence[Layout],
        chunked: bool = False,
    ) -> None:
        """Plan the reads and writes of a pass.

        Args:
            tensors: Keys and values of one slab, each [layers, places, kv_heads, capacity, D], with D in its stored
                size (`kv_types.py`). A single tensor if the keys also serve as values.
            window: See `LayerAttention`.
            rows: The rows of the pass.
            members: For the slots that the slab holds (one slot or all of them), their indices in the pass.
            places: For each member, its place in the slab (see `slab.Slab`).
            layouts: For each member, the layout of its rows.
            chunked: See `LayerAttention`.
        """
        self.tensors, self.window, self.chunked, self.rows = tensors, window, chunked, rows
        self.kernel_view: object = None
        """The plan in the data structures of the kernels. The first layer creates it."""
        self.members, self.places, self.layouts = list(members), list(places), layouts
        self.lengths = [rows.lengths[i] for i in self.members]
        self.count = max(rows.counts[i] for i in self.members)
        ends = [length + x.visible.shape[1] for length, x in zip(self.lengths, layouts, strict=True)]
        self.reach = min(max(ends), tensors[0].shape[3])
        # As long as all positions lie within the window, every row attends to all columns of the committed prefix. The
        # mask can then begin where the shortest prefix ends.
        self._moved = window is not None and max(ends) > window
        self.seen = 0 if self._moved else min(self.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """The mask [B, T, reach - seen], which is added to the scores of columns `seen` to `reach` - 1."""
        keys = self.tensors[0]
        if self._moved and self.window:
            span = self.window, self.chunked
            mask = _window_mask(self.count, self.lengths, self.layouts, span, keys.shape[3], self.reach)
        else:
            mask = _mask(self.count, self.lengths, self.layouts, self.seen, self.reach)
        return mask.to(keys.device, torch.float64 if keys.dtype == torch.float64 else torch.float32)

    @cached_property
    def _writes(self) -> _SlabWrites:
        device, (_, _, kv, capacity, head_dim) = self.tensors[0].device, self.tensors[0].shape
        stores, copies, of = list[tuple[int, int]](), list[tuple[int, int]](), self.rows.tokens.shape[1]
        for i, place, length, x in zip(self.members, self.places, self.lengths, self.layouts, strict=True):
            lines = [place * kv * capacity + (length + column) % capacity for column in range(len(x.rows))]
            stores += [(lines[column], i * of + row) for column, row in x.stores.tolist()]
            copies += [(lines[column], lines[source]) for column, source in x.copies.tolist()]
        # In the view [places * kv_heads * capacity, D] of the slab, one store per layer is enough for all slots.
        heads = torch.arange(kv, device=device) * capacity
        targets, copy_targets, copy_sources = (
            (torch.tensor(column, dtype=torch.long, device=device)[:, None] + heads).flatten()
            for column in ([to for to, _ in stores], [to for to, _ in copies], [source for _, source in copies])
        )
        wanted = [row for _, row in stores]
        in_order = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        sources = slice(wanted[0], wanted[-1] + 1) if in_order else torch.tensor(wanted, device=device)
        flat = [x.view(len(x), -1, head_dim).unbind(0) for x in self.tensors]
        return _SlabWrites(targets, sources, copy_sources, copy_targets, flat)

    @cached_property
    def _views(self) -> list[tuple[Tensor, ...]] | None:
        """For each layer, views of its keys and values, each [B * kv_heads, reach, D]. None if the slots are not
        consecutive."""
        first, end = self.places[0], self.places[0] + len(self.places)
        if self.places != list(range(first, end)):
            return None
        return [x[:, first:end, :, : self.reach].flatten(1, 2).unbind(0) for x in self.tensors]

    def write(self, index: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's keys and values for the rows of the pass.

        Args:
            index: Index of the layer within the slab.
            k: Keys [B, T, kv_heads, D] of all slots of the pass. D may be smaller than in the slab, whose heads are
                padded if native layers use it too.
            v: Values, in the same shape.
        """
        x = self._writes
        for flat, new in zip(x.flat, (k, v), strict=False):  # a slab of one tensor stores only the keys
            new = to_stored(new.flatten(0, 1)[x.sources], flat[index])
            if len(x.copy_sources):
                flat[index].index_copy_(0, x.copy_targets, flat[index][x.copy_sources])
            flat[index].index_copy_(0, x.targets, new.reshape(-1, new.shape[-1]))

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of the slab's layer `index`, for the slots of the plan.

        Each is [B * kv_heads, reach, D], with D in its stored size.
        """
        if self._views:
            found = [view[index] for view in self._views]
        else:
            found = [x[index, self.places, :, : self.reach].flatten(0, 1) for x in self.tensors]
        return found[0], found[-1]

    def queries(self, q: Tensor) -> Tensor:
        """Select the queries of this plan's slots and rows from all queries q [B, T, heads, D] of the pass."""
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
        """Make a pass.

        Args:
            plans: For each kind of attention, the plans that together cover all slots of the pass, in order.
            layers: Attention of each layer. None for a layer without attention.
            indices: `slab_indices` of the layers.
            prefill: See `Rows`.
        """
        self.plans, self._layers, self._indices, self._prefill = plans, layers, indices, prefill

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values, but do not attend: the first half of `attend`, for rows that only later passes
        read."""
        slab, index = self._indices[layer]
        for plan in self.plans[slab]:
            plan.write(index, k, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`. Native layers do not call it (`models.cpu_layers.NativeLayers.run`)."""
        spec, (slab, index) = self._layers[layer], self._indices[layer]
        if spec and spec.kernel:
            return spec.kernel(self.plans[slab], index, spec, q, k, v)
        self.write(layer, k, v)
        return self.look(layer, q)

    def look(self, layer: int, q: Tensor) -> Tensor:
        """See `protocols.SharedPass.look`."""
        slab, index = self._indices[layer]
        spec = self._layers[layer]
        assert spec
        if spec.kernel:
            return spec.kernel(self.plans[slab], index, spec, q)
        return torch.cat([self._look(plan, index, spec, q) for plan in self.plans[slab]])

    def _look(self, plan: SlabPlan, index: int, spec: LayerAttention, q: Tensor) -> Tensor:
        """Return the attention output of one plan's slots, given the queries of the whole pass."""
        stored, size = plan.read(index), q.shape[-1]
        keys = values = from_stored(stored[0], q.dtype)[..., :size]  # native layers of the same model pad heads
        if not spec.single:
            values = from_stored(stored[1], q.dtype)[..., :size]
        own, padding = plan.queries(q), q.shape[1] - plan.count
        if self._prefill and spec.softcap is None and spec.sinks is None:
            mixed = _fast(own, keys, values, plan, spec)
        else:
            parts = enumerate(own.split(_ROWS, 1))
            mixed = torch.cat([_exact(x, keys, values, plan, spec, i * _ROWS) for i, x in parts], 1)
        # A padding row repeats the first row's token. If it has the same attention output too, it is routed to the same
        # experts, so a mixture-of-experts layer reads no additional weights.
        return torch.cat([mixed, mixed[:, :1].expand(-1, padding, -1)], 1) if padding else mixed


def _fast(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, spec: LayerAttention) -> Tensor:
    """Compute attention with the fastest kernel. It may be used for prompt chunks, because they do not depend on
    drafts."""
    b, t, heads, d = q.shape
    keys, values = (x.unflatten(0, (b, -1)) for x in (keys, values))
    mask = F.pad(plan.mask, (plan.seen, 0)).to(q.dtype)[:, None]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=spec.scale, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(b, t, heads * d)


def _exact(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, spec: LayerAttention, first: int = 0) -> Tensor:
    """Compute attention such that a row's bits depend neither on the columns between its ancestors nor on other rows.

    The softmax is computed step by step, with a sum that does not depend on the order of columns: bfloat16 weights have
    8 significant bits, so float64 adds them up exactly.

    Args:
        q: Queries [B, T, heads, D].
        keys: Keys [B * kv_heads, reach, D].
        values: Values, in the same shape.
        plan: The plan for these slots.
        spec: Attention of the layer.
        first: Index in the pass of the first row of q.
    """
    b, t, heads, d = q.shape
    kv = len(keys) // b
    group = heads // kv
    # The query heads that share a key head become rows of one matrix multiplication. `bmm` reads its left operand in
    # place, but copies its right operand into packed form first. So the many keys are on the left and the few queries
    # are on the right.
    queries = (q * spec.scale).view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
    scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
    scores = scores.to(plan.mask.dtype, memory_format=torch.contiguous_format)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores.view(b, kv, group, t, -1)[..., plan.seen :].add_(plan.mask[:, None, None, first : first + t])
    # A weighted sum of 512 values may overflow float16.
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
    """Return the weighted sum of values [B * kv_heads, columns, D]. One batched matrix multiplication computes the sums
    of all blocks, which are then added in order."""
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
    """The writes of a pass to each layer of a slab. A layer is viewed as lines, [places * kv_heads * capacity, D].

    Attributes:
        targets: The lines that rows are stored in. A line is the D elements of one key head in one column.
        sources: For each of `targets`, the row to store, among all B * T rows.
        copy_sources: The lines of earlier passes that are copied before rows are stored.
        copy_targets: For each of `copy_sources`, the line that it is copied to.
        flat: The keys and values of each layer, [lines, D].
    """

    targets: Tensor
    sources: slice | Tensor
    copy_sources: Tensor
    copy_targets: Tensor
    flat: list[tuple[Tensor, ...]]


def _mask(count: int, lengths: Sequence[int], layouts: Sequence[Layout], first: int, reach: int) -> Tensor:
    """Return a mask [B, count, reach - first], with 0 for the prefix and the visible columns, and -inf elsewhere."""
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
    """Return a mask [B, count, reach] for a window that no longer begins at position 0. The ring may have wrapped.
    `span`: `window` and `chunked` (see `LayerAttention`)."""
    window, chunked = span
    mask = torch.zeros(len(layouts), count, reach)
    for slot, length, x in zip(mask, lengths, layouts, strict=True):
        here = length + x.row_depths[:, None]
        passed = passed_by(here, window, chunked)
        # Each column holds the highest position below `length` that maps to it.
        columns = torch.arange(reach)
        prefix = length - 1 - (length - 1 - columns) % capacity
        visible = (prefix >= 0) & (prefix > passed)
        tail = (length + torch.arange(x.visible.shape[1])) % capacity
        visible[:, tail] = x.visible & (length + x.column_depths > passed)
        slot[: len(visible)].masked_fill_(~visible, -torch.inf)
    return mask


def passed_by(here: Tensor, window: int, chunked: bool) -> Tensor:
    """Return, for rows at positions `here`, the highest position that is no longer in the window."""
    return here - (here % window + 1 if chunked else window)
