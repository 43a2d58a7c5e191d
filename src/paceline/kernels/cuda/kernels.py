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
    visible_positions = min(capacity, spec.window + SPLIT) if spec.window else capacity
    shared_splits, own_splits = triton.cdiv(visible_positions, SPLIT) + 1, triton.cdiv(table.reach - 1, SPLIT) + 1
    partials = q.new_empty(b, t, heads, shared_splits + own_splits, d, dtype=torch.float32)
    max_scores, denominators = (q.new_empty(partials.shape[:-1], dtype=torch.float32) for _ in range(2))
    out = torch.empty(b, t, heads * d, dtype=q.dtype, device=q.device)
    shape = {"HEADS": heads, "KV": kv, "D": d, "WIDE": max(16, triton.next_power_of_2(d)), "SPLIT": SPLIT}
    flags = {"CAPPED": spec.softcap is not None, "WINDOWED": spec.window is not None}
    description = (table.lengths, table.depths, table.lengths.stride(0), spec.window or 0)
    _attend_split[(tiles * shared_splits + t * own_splits, b * kv)](
        q, *q.stride()[:3], keys, values, table.places, table.paths, *table.paths.stride()[:2], *description,
        partials, max_scores, denominators, t, capacity, tiles, shared_splits, shared_splits + own_splits,
        spec.scale, spec.softcap or 1.0,
        **shape, **flags, BLOCK=BLOCK, TILE=tile,
    )  # fmt: skip
    _merge_splits[(b * t, heads)](
        partials, max_scores, denominators, out, *description, t, shared_splits + own_splits,
        **shape, WINDOWED=flags["WINDOWED"],
    )  # fmt: skip
    return out


@triton.jit
def _first_split(length, window, SPLIT: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the number of the first split that any row attends to."""
    if WINDOWED:
        return tl.maximum(0, length - window + 1) // SPLIT
    return length * 0


_SIZES = [
    *("q_b", "q_t", "q_h", "path_b", "path_t", "table_stride", "window", "rows", "capacity"),
    *("tiles", "shared_splits", "max_splits"),
]
_TABLES = ["places", "paths", "lengths", "depths"]


# Without these options, Triton compiles special kernels for arguments that are 1 or multiples of 16, which may give
# different bits.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def _attend_split(
    q, q_b, q_t, q_h, keys, values, places, paths, path_b, path_t, lengths, depths, table_stride, window,
    partials, max_scores, denominators, rows, capacity, tiles, shared_splits, max_splits, scale, softcap,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the partial results of one split. If the split ends before the first row, compute them for a tile of the
    queries of all rows. Otherwise, compute them for the queries of a single row."""
    b, kv, program = tl.program_id(1) // KV, tl.program_id(1) % KV, tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV
    length = tl.load(lengths + b * table_stride)
    first_split, full_splits = _first_split(length, window, SPLIT, WINDOWED), length // SPLIT
    query_index = tl.arange(0, TILE)
    is_single_row = program >= tiles * shared_splits
    number = program - tiles * shared_splits
    split = tl.where(is_single_row, full_splits + number // rows, first_split + program // tiles)
    query_index = tl.where(is_single_row, query_index, program % tiles * TILE + query_index)
    row = tl.where(is_single_row, number % rows, query_index // GROUP)
    valid = tl.where(is_single_row, query_index < GROUP, row < rows)
    head = kv * GROUP + query_index % GROUP
    position = length + tl.load(depths + b * table_stride + row, mask=valid, other=0)
    last_position = tl.max(tl.where(valid, position, 0), 0)
    if (is_single_row & (split * SPLIT <= last_position)) | ((program < tiles * shared_splits) & (split < full_splits)):
        dimension = tl.arange(0, WIDE)
        query_mask = valid[:, None] & (dimension[None] < D)
        query_offsets = b * q_b + row[:, None] * q_t + head[:, None] * q_h + dimension[None]
        query = tl.load(q + query_offsets, mask=query_mask, other=0.0)
        max_score = tl.full([TILE], LOW, tl.float32)
        denominator = tl.zeros([TILE], tl.float32)
        weighted_values = tl.zeros([TILE, WIDE], tl.float32)
        slab_offset = (tl.load(places + b * table_stride).to(tl.int64) * KV + kv) * capacity * D
        path_pointers = paths + b * path_b + tl.where(is_single_row, number % rows, 0) * path_t
        for step in range(0, tl.minimum(SPLIT, last_position + 1 - split * SPLIT), BLOCK):
            key_position = split * SPLIT + step + tl.arange(0, BLOCK)
            depth = key_position - length
            exists = key_position <= last_position
            column = (length + tl.load(path_pointers + depth, mask=exists & (depth >= 0), other=0)) % capacity
            column = tl.where(depth < 0, key_position % capacity, column)
            kv_offsets = slab_offset + column[:, None] * D + dimension[None]
            kv_mask = exists[:, None] & (dimension[None] < D)
            key = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            visible = key_position[None] <= position[:, None]
            if WINDOWED:
                visible = visible & (key_position[None] > position[:, None] - window)
            score = tl.where(visible, score, 2 * LOW)
            new_max = tl.maximum(max_score, tl.max(score, 1))
            weight = tl.exp(score - new_max[:, None])
            rescale = tl.exp(max_score - new_max)
            denominator = denominator * rescale + tl.sum(weight, 1)
            value = tl.load(values + kv_offsets, mask=kv_mask, other=0.0)
            weighted_values = weighted_values * rescale[:, None] + tl.dot(
                weight.to(value.dtype), value, input_precision="ieee"
            )
            max_score = new_max
        partial = ((b * rows + row) * HEADS + head).to(tl.int64) * max_splits + split - first_split
        tl.store(max_scores + partial, max_score, mask=valid)
        tl.store(denominators + partial, denominator, mask=valid)
        tl.store(partials + partial[:, None] * D + dimension[None], weighted_values, mask=query_mask)


@triton.jit(
    do_not_specialize=["table_stride", "window", "rows", "max_splits"],
    do_not_specialize_on_alignment=["lengths", "depths"],
)
def _merge_splits(
    partials, max_scores, denominators, out, lengths, depths, table_stride, window, rows, max_splits,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query, in the order of the splits."""
    row, head = tl.program_id(0), tl.program_id(1)
    b = row // rows
    length = tl.load(lengths + b * table_stride)
    last_split = (length + tl.load(depths + b * table_stride + row % rows)) // SPLIT
    first_split = _first_split(length, window, SPLIT, WINDOWED)
    dimension = tl.arange(0, WIDE)
    max_score = tl.full([], LOW, tl.float32)
    denominator = tl.zeros([], tl.float32)
    weighted_values = tl.zeros([WIDE], tl.float32)
    partial = (row * HEADS + head).to(tl.int64) * max_splits
    for split in range(0, last_split - first_split + 1):
        split_max = tl.load(max_scores + partial + split)
        new_max = tl.maximum(max_score, split_max)
        rescale, split_rescale = tl.exp(max_score - new_max), tl.exp(split_max - new_max)
        split_values = tl.load(partials + (partial + split) * D + dimension, mask=dimension < D, other=0.0)
        denominator = denominator * rescale + tl.load(denominators + partial + split) * split_rescale
        weighted_values = weighted_values * rescale + split_values * split_rescale
        max_score = new_max
    out_pointers = out + (row * HEADS + head).to(tl.int64) * D + dimension
    tl.store(out_pointers, (weighted_values / denominator).to(out.dtype.element_ty), mask=dimension < D)


ROWS = 64
"""Number of rows in a tile of a matrix multiplication. Hopper's tensor cores need at least this number, so smaller
passes are padded."""


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
    x_pointers = x + row[:, None].to(tl.int64) * IN + step[None]
    weight_pointers = weight + column[None].to(tl.int64) * IN + step[:, None]
    for first_input in range(0, IN, DEPTH):
        input_mask = (first_input + step < IN) | EVEN
        a = tl.load(x_pointers + first_input, mask=(row < rows)[:, None] & input_mask[None], other=0.0)
        b = tl.load(weight_pointers + first_input, mask=(column < OUT)[None] & input_mask[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)[None]
    offsets = row[:, None].to(tl.int64) * OUT + column[None]
    valid = (row < rows)[:, None] & (column < OUT)[None]
    if ADDED:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + offsets, mask=valid, other=0.0)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=valid)
