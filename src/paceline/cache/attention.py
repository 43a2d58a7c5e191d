"""Attention over the slab cache: which columns a row sees, and sums whose bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.layout import Layout
from paceline.types import Rows

BLOCK = 512
"""Columns whose weighted values are summed by one product. A longer one would be cut where its length says, and a row
would get other bits when more rows travel with it; these cuts stand at absolute places."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends: scores times `scale`, then cap * tanh(scores / cap) where there is a `softcap`; a row sees
    the last `window` positions, its own included (None: all). `mutual`: rows of one pass see each other, the later ones
    too (a drafted block)."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    mutual: bool = False

    @property
    def kind(self) -> tuple[int | None, bool]:
        """Layers of one kind share a slab, and what a row sees in it."""
        return self.window, self.mutual


class SlabPlan:
    """Where the rows of one pass are written in a slab, and what each of them sees there."""

    def __init__(
        self,
        slabs: tuple[Tensor, Tensor],
        window: int | None,
        places: Sequence[int],
        rows: Rows,
        layouts: Sequence[Layout],
    ) -> None:
        """`places`: where in the slabs [layers, places, kv_heads, capacity, D] the pass's slots lie."""
        self.slabs, self.window, self.places, self.rows, self.layouts = slabs, window, places, rows, layouts
        self.count = max(rows.counts)
        _, _, kv, capacity, _ = slabs[0].shape
        firsts = [place * kv * capacity for place in places]
        self.stores = _stores(rows, layouts, firsts, capacity)
        ends = [length + x.visible.shape[1] for length, x in zip(rows.lengths, layouts, strict=True)]
        self.reach = min(max(ends), capacity)
        # Before the shortest slot's tail every row sees every column, as long as no window has moved on.
        self._moved = window is not None and max(ends) > window
        self.seen = 0 if self._moved else min(rows.lengths)

    @cached_property
    def mask(self) -> Tensor:
        """To add to the scores of the columns from `seen` on [B, T, reach - seen]."""
        rows, keys = self.rows, self.slabs[0]
        if self._moved and self.window:
            mask = _window_mask(self.count, rows, self.layouts, self.window, keys.shape[3], self.reach)
        else:
            mask = _mask(self.count, rows, self.layouts, self.seen, self.reach)
        return mask.to(keys.device, torch.float64 if keys.dtype == torch.float64 else torch.float32)

    @cached_property
    def _lines(self) -> _WriteRows:
        """`stores`, for torch."""
        device, (_, _, kv, capacity, head_dim) = self.slabs[0].device, self.slabs[0].shape
        # Rows of the slab seen as [places * kv_heads * capacity, D]: one store for all slots of a layer.
        heads = torch.arange(kv, device=device) * capacity
        x = self.stores
        columns, copied, copies = (
            (torch.tensor(lines, dtype=torch.long, device=device)[:, None] + heads).flatten()
            for lines in (x.columns, x.copied, x.copies)
        )
        lines = self.rows.lines
        wanted = [lines[row] for row in x.sources]
        plain = wanted == list(range(self.rows.tokens.numel()))
        sources = None if plain else torch.tensor(wanted, dtype=torch.long, device=device)
        return _WriteRows(
            columns, sources, copied, copies, [s.view(len(s), -1, head_dim).unbind(0) for s in self.slabs]
        )

    @cached_property
    def _views(self) -> list[Sequence[Tensor]]:
        return [_of_places(slab, self.places, self.reach) for slab in self.slabs]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [B, T, kv_heads, D]."""
        lines = self._lines
        for flat, x in zip(lines.flat, (k, v), strict=True):
            if lines.sources is not None:
                x = x.flatten(0, 1)[lines.sources]
            if len(lines.copied):
                flat[layer].index_copy_(0, lines.copies, flat[layer][lines.copied])
            flat[layer].index_copy_(0, lines.columns, x.reshape(-1, x.shape[-1]))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the pass's slots, each [B * kv_heads, reach, D]."""
        keys, values = (view[layer] for view in self._views)
        return keys, values


@dataclass(frozen=True, slots=True)
class _WriteRows:
    """Where a pass writes, as lines of the flat slabs of each layer: see `_Stores`."""

    columns: Tensor
    sources: Tensor | None
    copied: Tensor
    copies: Tensor
    flat: list[tuple[Tensor, ...]]


class SlabPass:
    """One forward pass over a `SlabCache` (`protocols.Pass`)."""

    def __init__(self, plans: Sequence[SlabPlan], layers: Sequence[LayerAttention], prefill: bool) -> None:
        """`plans`: one per kind, in the order in which the layers first name them."""
        self.plans = plans
        order = list(dict.fromkeys(layer.kind for layer in layers))
        counts = [0] * len(order)
        self._layers: list[tuple[SlabPlan, int, LayerAttention]] = []
        for layer in layers:
            kind = order.index(layer.kind)
            self._layers.append((plans[kind], counts[kind], layer))
            counts[kind] += 1
        self._prefill = prefill

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values of rows that only later passes look at: the first half of `attend`."""
        plan, index, _ = self._layers[layer]
        plan.write(index, k, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self.write(layer, k, v)
        plan, index, how = self._layers[layer]
        keys, values = plan.read(index)
        mix = _fast if self._prefill and how.softcap is None else _exact
        mixed = mix(q[:, : plan.count], keys, values, plan, how)
        return mixed if plan.count == q.shape[1] else F.pad(mixed, (0, 0, 0, q.shape[1] - plan.count))


def _fast(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, how: LayerAttention) -> Tensor:
    """A prompt is cut into the same chunks whatever is drafted, so the fastest kernel will do."""
    b, t, heads, d = q.shape
    keys, values = (x.view(b, -1, plan.reach, d) for x in (keys, values))
    mask = F.pad(plan.mask, (plan.seen, 0)).to(q.dtype)[:, None]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=how.scale, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(b, t, heads * d)


def _exact(q: Tensor, keys: Tensor, values: Tensor, plan: SlabPlan, how: LayerAttention) -> Tensor:
    """Gives a row the same bits whatever lies between its ancestors and whatever travels with it.

    The softmax is taken apart so that its sum can be one that no order of columns changes: weights of 8 bits add up
    exactly in float64.
    """
    b, t, heads, d = q.shape
    kv = len(keys) // b
    group = heads // kv
    # The query heads that share a key head become rows of one product. Keys stand on its left: that side is read as
    # it lies, while the other, here the few queries, is packed first.
    queries = (q * how.scale).view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
    scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
    scores = scores.to(plan.mask.dtype, memory_format=torch.contiguous_format)
    if how.softcap is not None:
        scores = scores.div_(how.softcap).tanh_().mul_(how.softcap)
    scores.view(b, kv, group, t, -1)[..., plan.seen :].add_(plan.mask[:, None, None])
    # 512 values under weights of up to 1 may pass float16's range.
    summed = torch.float32 if keys.dtype == torch.float16 else keys.dtype
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().to(summed)
    wide = plan.mask.dtype if weights.device.type == "mps" else torch.float64
    total = weights.sum(-1, keepdim=True, dtype=wide).to(plan.mask.dtype)
    mixed = _mix(weights, values.to(summed), plan.mask.dtype).div_(total)
    lines = mixed.view(b, kv, group, t, d).permute(0, 3, 1, 2, 4)
    return lines.to(q.dtype, memory_format=torch.contiguous_format).reshape(b, t, heads * d)


def _mix(weights: Tensor, values: Tensor, precise: torch.dtype) -> Tensor:
    """The weighted sum of values [B kv, rows, D], block by block: whole blocks in one product, added in their order."""
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


def _of_places(slab: Tensor, places: Sequence[int], reach: int) -> Sequence[Tensor]:
    """Per layer the pass's slots [B * kv_heads, reach, D]: a view where they lie side by side in order."""
    first = places[0]
    if list(places) == list(range(first, first + len(places))):
        return slab[:, first : first + len(places), :, :reach].flatten(1, 2).unbind(0)
    return _Gathered(slab, list(places), reach)


class _Gathered(Sequence[Tensor]):
    """Slots in any order, copied layer by layer at the moment of use, so that the copy follows the writes."""

    def __init__(self, slab: Tensor, places: list[int], reach: int) -> None:
        self._slab, self._places, self._reach = slab, places, reach

    def __getitem__(self, layer: int) -> Tensor:  # type: ignore[override]
        return self._slab[layer, self._places, :, : self._reach].flatten(0, 1)

    def __len__(self) -> int:
        return len(self._slab)


@dataclass(frozen=True, slots=True)
class _Stores:
    """What a pass writes, as lines of the flat slab (of the first key head): `columns` get the rows `sources` (of the
    real ones), `copies` what earlier passes left at `copied`."""

    columns: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


def _stores(rows: Rows, layouts: Sequence[Layout], firsts: Sequence[int], capacity: int) -> _Stores:
    """`firsts`: the flat line where each slot's place begins."""
    stores = _Stores()
    before = 0  # the real rows of the slots before
    for length, start, count, x, first in zip(rows.lengths, rows.starts, rows.counts, layouts, firsts, strict=True):
        at = [first + (length + column) % capacity for column in range(len(x.sources))]
        for column in x.fresh:
            row = x.sources[column]
            if row >= start:
                stores.columns.append(at[column])
                stores.sources.append(before + row - start)
            else:
                stores.copies.append(at[column])
                stores.copied.append(at[x.home[row]])
        before += count
    return stores


def _mask(count: int, rows: Rows, layouts: Sequence[Layout], first: int, reach: int) -> Tensor:
    """[B, count, reach - first] to add to the scores: 0 for the prefix and the visible columns, -inf elsewhere."""
    mask = torch.zeros(len(layouts), count, reach - first)
    for line, x, length in zip(mask, layouts, rows.lengths, strict=True):
        tail = line[:, length - first :]
        tail[:, 1:] = -torch.inf  # rows that only fill up see the first one
        tail[: len(x.visible)] = -torch.inf
        tail[: len(x.visible), : x.visible.shape[1]].masked_fill_(x.visible, 0.0)
    return mask


def _window_mask(count: int, rows: Rows, layouts: Sequence[Layout], window: int, capacity: int, reach: int) -> Tensor:
    """The same [B, count, reach] for a window that has moved on, over a ring that may have wrapped."""
    mask = torch.zeros(len(layouts), count, reach)
    for line, length, x in zip(mask, rows.lengths, layouts, strict=True):
        here = length + x.deep[:, None]
        # The position that each column holds of the prefix: the last one before `length` that falls on it.
        columns = torch.arange(reach)
        prefix = length - 1 - (length - 1 - columns) % capacity
        visible = (prefix >= 0) & (prefix > here - window)
        tail = (length + torch.arange(x.visible.shape[1])) % capacity
        visible[:, tail] = x.visible & (length + x.below > here - window)
        line[: len(visible)].masked_fill_(~visible, -torch.inf)
    return mask
