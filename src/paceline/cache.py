"""The slab KV cache: write, attend, commit, release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import OutOfMemory, is_out_of_memory
from paceline.layout import Layout, ancestors, layout
from paceline.types import Rows

_FIRST = 256
"""Positions of a new slab. It doubles when a text outgrows it."""

BLOCK = 512
"""Columns whose weighted values are summed by one product. A longer one would be cut where its length says, and a row
would get other bits when more rows travel with it; these cuts stand at absolute places."""


class SlabCache:
    """Keys and values of all slots in two tensors, addressed by position.

    Each [layers, S, kv_heads, capacity, D]. Only the length reached is read, whatever the capacity.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, limit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`limit`: the context length; the slab may pass it by the rows of a draft that is never committed."""
        self._limit = limit
        self._lengths: list[int] = []
        self._free: list[int] = []
        self._home: dict[int, tuple[int, ...]] = {}
        # One attribute, so that an interrupt between two stores cannot leave slabs of two sizes.
        self._slabs = (
            torch.empty(layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device),
            torch.empty(layers, 0, kv_heads, 0, head_dim, dtype=dtype, device=device),
        )

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    @property
    def capacity(self) -> int:
        """Positions per slot that memory is held for."""
        return self._slabs[1].shape[3]

    def acquire(self) -> int:
        if not self._free:
            count = len(self._lengths)
            wanted = max(1, 2 * count)
            self._resize(wanted, max(self.capacity, _FIRST))
            self._lengths += [0] * (wanted - count)
            self._free = list(range(wanted - 1, count - 1, -1))
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        if slot not in self._free:
            self._lengths[slot] = 0
            self._free.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def room(self, slot: int, branch: int) -> int:
        """Up to the end of the block, where a tree may need two columns for a row, and one to align."""
        left = BLOCK - 1 - self._lengths[slot] % BLOCK
        return left if branch == 1 else max(0, left - 1) // 2

    def begin(self, rows: Rows) -> SlabPass:
        layouts = [_layout(p, n, rows.start) for p, n in zip(rows.parents, rows.lengths, strict=True)]
        self._home.update((slot, x.home) for slot, x in zip(rows.slots, layouts, strict=True))
        reach = max(n + x.visible.shape[1] for n, x in zip(rows.lengths, layouts, strict=True))
        if reach > self.capacity:
            self._resize(len(self._lengths), max(reach, min(2 * self.capacity, self._limit)))
        return SlabPass(*self._slabs, rows, layouts, reach)

    @torch.inference_mode()
    def commit(self, slot: int, path: Sequence[int]) -> None:
        length, home = self._lengths[slot], self._home[slot]
        moves = [(length + home[row], length + to) for to, row in enumerate(path, 1) if home[row] != to]
        if moves:
            source, target = (torch.tensor(x, device=self._slabs[0].device) for x in zip(*moves, strict=True))
            for slab in self._slabs:
                slab[:, slot, :, target] = slab[:, slot, :, source]
        self._lengths[slot] = length + 1 + len(path)

    def _resize(self, slots: int, capacity: int) -> None:
        old = self._slabs
        layers, held, kv_heads, _, head_dim = old[0].shape
        used = max(self._lengths, default=0)
        try:
            new = (
                # Zeros, because a column that is masked still meets a weight of 0, and 0 times garbage may be NaN.
                old[0].new_zeros(layers, slots, kv_heads, capacity, head_dim),
                old[1].new_zeros(layers, slots, kv_heads, capacity, head_dim),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = 2 * layers * slots * kv_heads * head_dim * capacity * old[0].element_size()
            raise OutOfMemory(
                f"no memory on {old[0].device} for a KV cache of {size / 2**20:,.0f} MiB "
                f"({slots} x {capacity} positions)",
                "Use a shorter prompt, fewer requests at once, or a smaller dtype",
            ) from error
        for here, there in zip(old, new, strict=True):
            there[:, :held, :, :used] = here[:, :, :, :used]
        self._slabs = new


class SlabPass:
    """One forward pass over a `SlabCache`: the slabs cut to the slots and the length that the pass reaches."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Rows, layouts: Sequence[Layout], reach: int) -> None:
        self._reach = reach
        self._precise = torch.float64 if keys.dtype == torch.float64 else torch.float32
        # 512 values under weights of up to 1 may pass float16's range.
        self._summed = torch.float32 if keys.dtype == torch.float16 else keys.dtype
        self._slots = rows.slots
        # Views of all layers at once: a dozen small calls a layer add up.
        self._writes = [
            _Write(line, _tails(keys, slot, span), _tails(values, slot, span), _order(x, keys.device))
            for line, (slot, span, x) in enumerate(zip(rows.slots, _spans(rows, layouts), layouts, strict=True))
        ]
        self._views = [self._of_slots(slab) for slab in (keys, values)]
        # Before the shortest slot's tail every row sees every column.
        self._seen = min(rows.lengths)
        self._mask = _mask(layouts, rows.lengths, self._seen, reach).to(keys.device, self._precise)
        self._attend = self._verify
        if rows.prefill:
            self._attend = self._prefill
            self._mask = torch.nn.functional.pad(self._mask, (self._seen, 0)).to(keys.dtype)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`."""
        self._write(layer, k, v)
        keys, values = (view[layer] for view in self._views)
        return self._attend(q, keys, values)

    def _prefill(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A prompt is cut into the same chunks whatever is drafted, so the fastest kernel will do."""
        b, t, heads, d = q.shape
        keys, values = (x.view(b, -1, self._reach, d) for x in (keys, values))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, self._mask, enable_gqa=heads != keys.shape[1]
        )
        return mixed.transpose(1, 2).reshape(b, t, heads * d)

    def _verify(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Gives a row the same bits whatever lies between its ancestors and whatever travels with it.

        The softmax is taken apart so that its sum can be one that no order of columns changes: weights of 8 bits
        add up exactly in float64.
        """
        b, t, heads, d = q.shape
        kv = len(keys) // b
        group = heads // kv
        # The query heads that share a key head become rows of one product. Keys stand on its left: that side is read
        # as it lies, while the other, here the few queries, is packed first.
        queries = (q * d**-0.5).view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
        scores = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
        scores = scores.to(self._precise, memory_format=torch.contiguous_format)
        scores.view(b, kv, group, t, -1)[..., self._seen :].add_(self._mask[:, None, None])
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().to(self._summed)
        wide = self._precise if weights.device.type == "mps" else torch.float64
        total = weights.sum(-1, keepdim=True, dtype=wide).to(self._precise)
        mixed = self._mix(weights, values).div_(total)
        lines = mixed.view(b, kv, group, t, d).permute(0, 3, 1, 2, 4)
        return lines.to(q.dtype, memory_format=torch.contiguous_format).reshape(b, t, heads * d)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for line, keys, values, order in self._writes:
            keys[layer].copy_(k[line] if order is None else k[line, order])
            values[layer].copy_(v[line] if order is None else v[line, order])

    def _mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """The weighted sum of values [B kv, rows, D], block by block."""
        values = values.to(self._summed)
        total = torch.bmm(weights[..., :BLOCK], values[:, :BLOCK]).to(self._precise)
        for start in range(BLOCK, self._reach, BLOCK):
            total += torch.bmm(weights[..., start : start + BLOCK], values[:, start : start + BLOCK])
        return total

    def _of_slots(self, slab: Tensor) -> Sequence[Tensor]:
        """Per layer the pass's slots [B kv, reach, D]: a view for one slot, else a copy that follows the writes."""
        if len(self._slots) == 1:
            return slab[:, self._slots[0], :, : self._reach].unbind(0)
        return _Gathered(slab, self._slots, self._reach)


class _Gathered(Sequence[Tensor]):
    """Several slots, layer by layer at the moment of use."""

    def __init__(self, slab: Tensor, slots: tuple[int, ...], reach: int) -> None:
        self._slab, self._slots, self._reach = slab, list(slots), reach

    def __getitem__(self, layer: int) -> Tensor:  # type: ignore[override]
        return self._slab[layer, self._slots, :, : self._reach].flatten(0, 1)

    def __len__(self) -> int:
        return len(self._slab)


class _Write(NamedTuple):
    """Line `line` of a pass goes to these columns of each layer, [C, kv, D]; `order`: the row of each column, or None
    for 0, 1, 2..."""

    line: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    order: Tensor | None


def _tails(slab: Tensor, slot: int, span: slice) -> Sequence[Tensor]:
    return slab[:, slot, :, span].transpose(1, 2).unbind(0)


def _spans(rows: Rows, layouts: Sequence[Layout]) -> list[slice]:
    """The columns that each slot writes."""
    starts = [length + rows.start for length in rows.lengths]
    return [slice(start, start + len(x.sources)) for start, x in zip(starts, layouts, strict=True)]


def _layout(parents: tuple[int, ...], length: int, start: int) -> Layout:
    """A tree grown over several passes only drafts, so its rows may lie as they come."""
    if not start:
        return layout(parents, length % 2)
    rows = tuple(range(len(parents) - start))
    return Layout(rows, rows, ancestors(parents)[start:])


def _order(x: Layout, device: torch.device) -> Tensor | None:
    return None if x.plain else torch.tensor(x.sources, device=device)


def _mask(layouts: Sequence[Layout], lengths: Sequence[int], first: int, reach: int) -> Tensor:
    """[B, T, reach - first] to add to the scores: 0 for the prefix and the visible columns, -inf elsewhere."""
    mask = torch.zeros(len(layouts), layouts[0].visible.shape[0], reach - first)
    for line, x, length in zip(mask, layouts, lengths, strict=True):
        tail = line[:, length - first :]
        tail.fill_(-torch.inf)
        tail[:, : x.visible.shape[1]].masked_fill_(x.visible, 0.0)
    return mask
