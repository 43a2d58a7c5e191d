"""Triton kernels. Import this module only if there is a GPU or Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.cache.attention import LayerAttention
from paceline.kernels.cuda.table import SPLIT, RowTable

BLOCK = 64
"""Number of keys that a program reads per step."""

TILE = 16
"""Number of queries (each is one head of one row) that share the keys and values that a program reads. Tensor cores
need at least this number."""

LOW = tl.constexpr(-1.0e30)
"""Finite substitute for -inf: LOW - LOW is 0, but inf - inf is NaN."""


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, table: RowTable, spec: LayerAttention) -> Tensor:
    """Compute `cache.attend` by flash-decoding (Dao et al. 2023) with fixed splits of `SPLIT` positions.

    All rows share the reads of the splits that end before the first row. In later splits, each row reads its own
    ancestors in the order of their positions, so it adds the same numbers in the same order as plain decoding. The bits
    of a row depend neither on the draft nor on the number of rows and slots.
    """
    b, t, heads, d = q.shape
    kv, capacity = keys.shape[1], keys.shape[2]
    group = heads // kv
    tile = max(TILE, triton.next_power_of_2(group))
    tiles = triton.cdiv(t * group, tile)
    seen = min(capacity, spec.window + SPLIT) if spec.window else capacity
    shared, own = triton.cdiv(seen, SPLIT) + 1, triton.cdiv(table.reach - 1, SPLIT) + 1
    parts = q.new_empty(b, t, heads, shared + own, d, dtype=torch.float32)
    peaks, sums = (q.new_empty(parts.shape[:-1], dtype=torch.float32) for _ in range(2))
    out = torch.empty(b, t, heads * d, dtype=q.dtype, device=q.device)
    shape = {"HEADS": heads, "KV": kv, "D": d, "WIDE": max(16, triton.next_power_of_2(d)), "SPLIT": SPLIT}
    flags = {"CAPPED": spec.softcap is not None, "WINDOWED": spec.window is not None}
    where = (table.lengths, table.depths, table.lengths.stride(0), spec.window or 0)
    _share[(tiles * shared + t * own, b * kv)](
        q, *q.stride()[:3], keys, values, table.places, table.paths, *table.paths.stride()[:2], *where,
        parts, peaks, sums, t, capacity, tiles, shared, shared + own, spec.scale, spec.softcap or 1.0,
        **shape, **flags, BLOCK=BLOCK, TILE=tile,
    )  # fmt: skip
    _join[(b * t, heads)](parts, peaks, sums, out, *where, t, shared + own, **shape, WINDOWED=flags["WINDOWED"])
    return out


@triton.jit
def _first(length, window, SPLIT: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the first split that any row attends to."""
    if WINDOWED:
        return tl.maximum(0, length - window + 1) // SPLIT
    return length * 0


_SIZES = ["q_b", "q_t", "q_h", "path_b", "path_t", "info", "window", "rows", "capacity", "tiles", "shared", "kept"]
_TABLES = ["places", "paths", "lengths", "depths"]


# Without these options, Triton compiles special kernels for arguments that are 1 or multiples of 16, which may give
# different bits.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def _share(
    q, q_b, q_t, q_h, keys, values, places, paths, path_b, path_t, lengths, depths, info, window,
    parts, peaks, sums, rows, capacity, tiles, shared, kept, scale, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one split. If the split ends before the first row, compute it for a tile of the queries of all rows.
    Otherwise, compute it for a single row."""
    b, kv, which = tl.program_id(1) // KV, tl.program_id(1) % KV, tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV
    length = tl.load(lengths + b * info)
    first, whole = _first(length, window, SPLIT, WINDOWED), length // SPLIT
    line = tl.arange(0, TILE)
    mine = which >= tiles * shared
    turn = which - tiles * shared
    share = tl.where(mine, whole + turn // rows, first + which // tiles)
    line = tl.where(mine, line, which % tiles * TILE + line)
    row = tl.where(mine, turn % rows, line // GROUP)
    real = tl.where(mine, line < GROUP, row < rows)
    head = kv * GROUP + line % GROUP
    here = length + tl.load(depths + b * info + row, mask=real, other=0)
    last = tl.max(tl.where(real, here, 0), 0)
    if (mine & (share * SPLIT <= last)) | ((which < tiles * shared) & (share < whole)):
        lane = tl.arange(0, WIDE)
        inside = real[:, None] & (lane[None] < D)
        asked = b * q_b + row[:, None] * q_t + head[:, None] * q_h + lane[None]
        query = tl.load(q + asked, mask=inside, other=0.0)
        peak = tl.full([TILE], LOW, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, WIDE], tl.float32)
        slab = (tl.load(places + b * info).to(tl.int64) * KV + kv) * capacity * D
        path = paths + b * path_b + tl.where(mine, turn % rows, 0) * path_t
        for step in range(0, tl.minimum(SPLIT, last + 1 - share * SPLIT), BLOCK):
            place = share * SPLIT + step + tl.arange(0, BLOCK)
            ahead = place - length
            known = place <= last
            column = (length + tl.load(path + ahead, mask=known & (ahead >= 0), other=0)) % capacity
            column = tl.where(ahead < 0, place % capacity, column)
            at = slab + column[:, None] * D + lane[None]
            there = known[:, None] & (lane[None] < D)
            key = tl.load(keys + at, mask=there, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            seen = place[None] <= here[:, None]
            if WINDOWED:
                seen = seen & (place[None] > here[:, None] - window)
            score = tl.where(seen, score, 2 * LOW)
            higher = tl.maximum(peak, tl.max(score, 1))
            weight = tl.exp(score - higher[:, None])
            fade = tl.exp(peak - higher)
            total = total * fade + tl.sum(weight, 1)
            value = tl.load(values + at, mask=there, other=0.0)
            mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            peak = higher
        entry = ((b * rows + row) * HEADS + head).to(tl.int64) * kept + share - first
        tl.store(peaks + entry, peak, mask=real)
        tl.store(sums + entry, total, mask=real)
        tl.store(parts + entry[:, None] * D + lane[None], mixed, mask=inside)


@triton.jit(do_not_specialize=["info", "window", "rows", "kept"], do_not_specialize_on_alignment=["lengths", "depths"])
def _join(
    parts, peaks, sums, out, lengths, depths, info, window, rows, kept,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query, in order."""
    row, head = tl.program_id(0), tl.program_id(1)
    b = row // rows
    length = tl.load(lengths + b * info)
    last = (length + tl.load(depths + b * info + row % rows)) // SPLIT
    first = _first(length, window, SPLIT, WINDOWED)
    lane = tl.arange(0, WIDE)
    peak = tl.full([], LOW, tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([WIDE], tl.float32)
    entry = (row * HEADS + head).to(tl.int64) * kept
    for share in range(0, last - first + 1):
        other = tl.load(peaks + entry + share)
        higher = tl.maximum(peak, other)
        fade, weight = tl.exp(peak - higher), tl.exp(other - higher)
        part = tl.load(parts + (entry + share) * D + lane, mask=lane < D, other=0.0)
        total = total * fade + tl.load(sums + entry + share) * weight
        mixed = mixed * fade + part * weight
        peak = higher
    place = out + (row * HEADS + head).to(tl.int64) * D + lane
    tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=lane < D)


ROWS = 64
"""Number of rows in a product's tile. Hopper's tensor cores need at least this number, so smaller passes are padded."""


def fixed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute residual + x W^T + b.

    The tile shape and the order of the sum depend only on W, so a row's bits depend only on that row. A BLAS library,
    in contrast, chooses tiles and splits sums by the number of rows.

    Args:
        x: [R, in].
        weight: W [out, in].
        bias: b [out], or None.
        residual: [R, out], or None.
        dtype: Type of the result.

    Returns:
        [R, out].
    """
    r, width = x.shape
    out = x.new_empty(r, len(weight), dtype=dtype)
    columns, depth = _tile(len(weight))
    grid = (triton.cdiv(len(weight), columns), triton.cdiv(r, ROWS))
    _product[grid](
        x.contiguous(), weight, bias if bias is not None else x, residual if residual is not None else x, out, r,
        OUT=len(weight), IN=width, BIASED=bias is not None, ADDED=residual is not None,
        EVEN=width % depth == 0, ROWS=ROWS, COLUMNS=columns, DEPTH=depth, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def _tile(columns: int) -> tuple[int, int]:
    """Choose the columns and the depth of a tile by the number of outputs, for at least one program per
    multiprocessor."""
    return (32, 128) if columns < 8192 else (64, 128) if columns < 32768 else (128, 64)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, residual, out, rows,
    OUT: tl.constexpr, IN: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result. Products are added from the first input to the last."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    left = x + row[:, None].to(tl.int64) * IN + step[None]
    right = weight + column[None].to(tl.int64) * IN + step[:, None]
    for at in range(0, IN, DEPTH):
        inside = (at + step < IN) | EVEN
        a = tl.load(left + at, mask=(row < rows)[:, None] & inside[None], other=0.0)
        b = tl.load(right + at, mask=(column < OUT)[None] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)[None]
    place = row[:, None].to(tl.int64) * OUT + column[None]
    real = (row < rows)[:, None] & (column < OUT)[None]
    if ADDED:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + place, mask=real, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real)
