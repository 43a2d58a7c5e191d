"""Attention of verified rows over a slab, with lengths that are on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention
from paceline.kernels.cuda.table import RowTable


def attend(q: Tensor, keys: Tensor, values: Tensor, table: RowTable, spec: LayerAttention) -> Tensor:
    """Attention of each row over its slot's committed prefix, its ancestors and itself, already written.

    q [B, T, heads, D]; keys and values [places, kv_heads, capacity, D], one layer of a slab with position p in column
    p % capacity. Returns [B, T, heads * D]. On CUDA by a kernel, elsewhere by plain products.
    """
    if q.device.type != "cuda":
        return reference(q, keys, values, table, spec)
    from paceline.kernels.cuda.kernels import tree_attention

    return tree_attention(q, keys, values, table, spec)


def reference(q: Tensor, keys: Tensor, values: Tensor, table: RowTable, spec: LayerAttention) -> Tensor:
    """The same by masked products over the whole slab. No shape depends on a length, so a graph can record it."""
    b, t, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    group = heads // keys.shape[1]
    k, v = (x[table.places.long()].to(wide).repeat_interleave(group, 1) for x in (keys, values))
    scores = q.to(wide).transpose(1, 2) @ k.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    unseen = ~visible(table, keys.shape[2], spec.window)[:, None]
    mixed = scores.masked_fill(unseen, -math.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(b, t, -1).to(q.dtype)


def visible(table: RowTable, capacity: int, window: int | None) -> Tensor:
    """Bool [B, T, capacity]: the columns that each row sees."""
    lengths, deep, paths = table.lengths.long(), table.depths.long(), table.paths.long()
    here = (lengths[:, None] + deep)[..., None]
    nearest = here - window if window else torch.full_like(here, -1)
    last = lengths[:, None] - 1
    # The prefix position held by a column: the last one before `length` that falls on it.
    prefix = (last - (last - torch.arange(capacity, device=lengths.device)) % capacity)[:, None]
    seen = (prefix >= 0) & (prefix > nearest)
    depth = torch.arange(table.reach, device=lengths.device)
    there = lengths[:, None, None] + depth
    kept = (depth <= deep[..., None]) & (there > nearest)
    columns = torch.where(kept, (lengths[:, None, None] + paths) % capacity, capacity)
    # A column that the rows have overwritten holds no prefix, but a ring is long enough that none of these is seen.
    return torch.cat([seen, seen[..., :1]], -1).scatter(2, columns, True)[..., :capacity]
