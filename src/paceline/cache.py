"""The slab KV cache: write, attend, commit, release."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.types import Rows

_FIRST = 256
"""Positions of a new slab. It doubles when a text outgrows it."""


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

    def begin(self, rows: Rows) -> SlabPass:
        reach = max(rows.lengths) + rows.start + rows.tokens.shape[1]
        if reach > self.capacity:
            wanted = max(reach, min(2 * self.capacity, self._limit))
            self._resize(len(self._lengths), wanted)
        return SlabPass(*self._slabs, rows, reach)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        length = self._lengths[slot]
        moves = [(length + row, length + to) for to, row in enumerate(path, 1) if row != to]
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

    def __init__(self, keys: Tensor, values: Tensor, rows: Rows, reach: int) -> None:
        self._keys, self._values, self._rows = keys, values, rows
        self._reach = reach
        count = rows.tokens.shape[1]
        self._spans = [
            (slot, slice(length + rows.start, length + rows.start + count))
            for slot, length in zip(rows.slots, rows.lengths, strict=True)
        ]
        self._mask = _mask(rows, reach, keys.device, torch.float64 if keys.dtype == torch.float64 else torch.float32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `protocols.Pass.attend`. Scores and softmax in float32 (float64 for a float64 model)."""
        b, t, heads, d = q.shape
        for i, (slot, span) in enumerate(self._spans):
            self._keys[layer, slot, :, :, span] = k[i].permute(1, 2, 0)
            self._values[layer, slot, :, span] = v[i].transpose(0, 1)
        keys, values = self._of_slots(self._keys[layer]), self._of_slots(self._values[layer])
        kv = keys.shape[1]
        group = heads // kv
        keys = keys[..., : self._reach].flatten(0, 1)
        values = values[:, :, : self._reach].flatten(0, 1)
        # The query heads that share a key head become rows of one product.
        queries = q.view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * t, d)
        scores = torch.bmm(queries, keys).view(b, kv, group, t, self._reach)
        weights = torch.add(self._mask, scores, alpha=d**-0.5).softmax(-1).to(v.dtype)
        mixed = torch.bmm(weights.view(b * kv, group * t, self._reach), values)
        return mixed.view(b, kv, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, heads * d)

    def _of_slots(self, slab: Tensor) -> Tensor:
        """The pass's slots of one layer [S, ...]: a view where they are neighbours, as they mostly are."""
        slots = self._rows.slots
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slab[slots[0] : slots[0] + len(slots)]
        return slab[list(slots)]


def _mask(rows: Rows, reach: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[B, 1, 1, T, reach] to add to the scores: 0 for the prefix and the visible rows, -inf elsewhere."""
    b, t, seen = rows.visible.shape
    mask = torch.zeros(b, 1, 1, t, reach, dtype=dtype, device=device)
    hidden = torch.zeros(b, t, seen, dtype=dtype).masked_fill_(~rows.visible, -torch.inf).to(device)
    for i, length in enumerate(rows.lengths):
        mask[i, 0, 0, :, length : length + seen] = hidden[i]
        mask[i, ..., length + seen :] = -torch.inf
    return mask
