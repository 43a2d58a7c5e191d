"""The slab KV cache: write, attend, commit, release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.layout import Layout, ancestors, layout
from paceline.types import Rows

_FIRST = 256
"""Positions of a new slab. It doubles when a text outgrows it."""

BLOCK = 512
"""Columns whose weighted values are summed by one product. A longer one would be cut where its length says, and a row
would get other bits when more rows travel with it; these cuts stand at absolute places."""


class SlabCache:
    """Keys and values of all slots in two tensors, addressed by position.

    Keys lie transposed, [layers, S, kv_heads, D, capacity], values [layers, S, kv_heads, capacity, D]: so both
    attention products read their operand as it lies. Only the length reached is read, whatever the capacity.
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
            torch.empty(layers, 0, kv_heads, head_dim, 0, dtype=dtype, device=device),
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
            keys, values = self._slabs
            source, target = (torch.tensor(x, device=keys.device) for x in zip(*moves, strict=True))
            keys[:, slot, :, :, target] = keys[:, slot, :, :, source]
            values[:, slot, :, target] = values[:, slot, :, source]
        self._lengths[slot] = length + 1 + len(path)

    def _resize(self, slots: int, capacity: int) -> None:
        old_keys, old_values = self._slabs
        layers, held, kv_heads, _, head_dim = old_values.shape
        used = max(self._lengths, default=0)
        try:
            keys = old_keys.new_empty(layers, slots, kv_heads, head_dim, capacity)
            values = old_values.new_empty(layers, slots, kv_heads, capacity, head_dim)
        except RuntimeError as error:
            size = 2 * layers * slots * kv_heads * head_dim * capacity * old_keys.element_size()
            raise OutOfMemory(
                f"no memory on {old_keys.device} for a KV cache of {size / 2**20:,.0f} MiB "
                f"({slots} x {capacity} positions)",
                "Use a shorter prompt, fewer requests at once, or a smaller dtype",
            ) from error
        keys[:, :held, :, :, :used] = old_keys[:, :, :, :, :used]
        values[:, :held, :, :used] = old_values[:, :, :, :used]
        self._slabs = (keys, values)


class SlabPass:
    """One forward pass over a `SlabCache`: the slabs cut to the slots and the length that the pass reaches."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Rows, layouts: Sequence[Layout], reach: int) -> None:
        self._keys, self._values, self._slots = keys, values, rows.slots
        self._reach = reach
        self._writes = [
            _Write(i, slot, slice(length + rows.start, length + rows.start + len(x.sources)), _order(x, keys.device))
            for i, (slot, length, x) in enumerate(zip(rows.slots, rows.lengths, layouts, strict=True))
        ]
        precise = torch.float64 if keys.dtype == torch.float64 else torch.float32
        self._mask = _mask(layouts, rows.lengths, reach, precise).to(keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`. Scores in float32 (float64 for a float64 model).

        The softmax is taken apart so that its sum can be one that no order of columns changes: weights of 8 bits
        add up exactly in float64.
        """
        b, t, heads, d = q.shape
        self._write(layer, k, v)
        keys, values = self._of_slots(self._keys[layer]), self._of_slots(self._values[layer])
        kv = keys.shape[1]
        group = heads // kv
        # The query heads that share a key head become rows of one product.
        queries = q.view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
        scores = torch.bmm(queries, keys[..., : self._reach].flatten(0, 1)).view(b, kv, group, t, self._reach)
        scores = torch.add(self._mask, scores, alpha=d**-0.5)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().to(v.dtype).view(b * kv, group * t, self._reach)
        mixed = self._mix(weights, values.flatten(0, 1)) / weights.sum(-1, keepdim=True, dtype=torch.float64)
        return mixed.to(v.dtype).view(b, kv, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, heads * d)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for line, slot, span, order in self._writes:
            new_k, new_v = (k[line], v[line]) if order is None else (k[line, order], v[line, order])
            self._keys[layer, slot, :, :, span] = new_k.permute(1, 2, 0)
            self._values[layer, slot, :, span] = new_v.transpose(0, 1)

    def _mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """The weighted sum of values [B kv, rows, D], block by block."""
        parts = [
            torch.bmm(weights[..., start : start + BLOCK], values[:, start : min(start + BLOCK, self._reach)])
            for start in range(0, self._reach, BLOCK)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float64)

    def _of_slots(self, slab: Tensor) -> Tensor:
        """The pass's slots of one layer [S, ...]: a view where they are neighbours, as they mostly are."""
        slots = self._slots
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slab[slots[0] : slots[0] + len(slots)]
        return slab[list(slots)]


class _Write(NamedTuple):
    """Line `line` of a pass goes to columns `span` of `slot`; `order`: the row of each column, None for 0, 1, 2..."""

    line: int
    slot: int
    span: slice
    order: Tensor | None


def _layout(parents: tuple[int, ...], length: int, start: int) -> Layout:
    """A tree grown over several passes only drafts, so its rows may lie as they come."""
    if not start:
        return layout(parents, length % 2)
    rows = tuple(range(len(parents) - start))
    return Layout(rows, rows, ancestors(parents)[start:])


def _order(x: Layout, device: torch.device) -> Tensor | None:
    return None if x.plain else torch.tensor(x.sources, device=device)


def _mask(layouts: Sequence[Layout], lengths: Sequence[int], reach: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, 1, T, reach] to add to the scores: 0 for the prefix and the visible columns, -inf elsewhere."""
    mask = torch.zeros(len(layouts), 1, 1, layouts[0].visible.shape[0], reach, dtype=dtype)
    for line, x, length in zip(mask[:, 0, 0], layouts, lengths, strict=True):
        tail = line[:, length:]
        tail.fill_(-torch.inf)
        tail[:, : x.visible.shape[1]].masked_fill_(x.visible, 0.0)
    return mask
