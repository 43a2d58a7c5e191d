"""Gated DeltaNet and Mamba-2 on the CPU kernels (`delta.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_int32, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import kernel, library
from paceline.kernels.cpu.matrix import SMALLER, fields


class _Delta(Structure):
    """The structure `Delta` in delta.h."""

    _fields_ = fields(
        (c_int32, "heads key_heads keys values tiled rows start"),
        (c_void_p, "parents before q k v decay beta changes out after"),
    )


@cache
def _kernel() -> Any:
    return kernel("paceline_delta", POINTER(_Delta), c_int32)


def scans_natively(matrix: Tensor) -> bool:
    """Return True if the kernels support a state of this dtype on this device."""
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32 and library() is not None


def scan_delta(
    matrix: Tensor,
    parents: Sequence[int],
    known: Sequence[Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    tiled: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the last T rows of a tree through the recurrence.

    Args:
        matrix: State before all rows, [heads, K, V].
        parents: Parent of every row of the tree, -1 for a root.
        known: decay, k and changes of the rows before the last T; None if there are no such rows.
        q: [T, key_heads, K].
        k: [T, key_heads, K].
        v: [T, heads, V].
        decay: [T, heads].
        beta: [T, heads], or None (Mamba-2): then the changes equal the values.
        tiled: True if head h uses key head h modulo `key_heads`.

    Returns:
        Outputs [T, heads, V], changes [T, heads, V], and the state after the last row if the tree is a chain, else
        None.

    Raises:
        OutOfMemory: If there is no memory for the states.
    """
    out, changes = torch.empty(v.shape, dtype=torch.float32), torch.empty(v.shape, dtype=torch.float32)
    start = len(parents) - len(v)
    if known:
        decay, k, changes = (torch.cat(pair) for pair in zip(known, (decay, k, changes), strict=True))
    chain = tuple(parents) == tuple(range(-1, len(parents) - 1))
    after = torch.empty(matrix.shape, dtype=torch.float32) if chain else None
    _call(matrix, parents, start, k, (q, k, v, decay, beta), changes, out, after, tiled)
    return out, changes[start:], after


def apply_delta(matrix: Tensor, decay: Tensor, k: Tensor, changes: Tensor, tiled: bool) -> Tensor:
    """Advance the state by a chain of rows with known changes.

    Args:
        matrix: State before the rows, [heads, K, V].
        decay: [n, heads].
        k: [n, key_heads, K].
        changes: [n, heads, V].
        tiled: See `scan_delta`.

    Returns:
        The state after the rows, [heads, K, V].
    """
    after, count = torch.empty(matrix.shape, dtype=torch.float32), len(decay)
    _call(matrix, range(-1, count - 1), count, k, (k, k, changes, decay, None), changes, changes, after, tiled)
    return after


def _call(
    matrix: Tensor,
    parents: Sequence[int],
    start: int,
    k: Tensor,
    inputs: Sequence[Tensor | None],
    changes: Tensor,
    out: Tensor,
    after: Tensor | None,
    tiled: bool,
) -> None:
    matrix, changes = matrix.contiguous(), changes.contiguous()
    inputs = [None if x is None else x.contiguous() for x in inputs]
    (heads, keys, values), key_heads = matrix.shape, k.shape[1]
    parent_array = (c_int32 * len(parents))(*parents)
    delta = _Delta(heads, key_heads, keys, values, tiled, len(parents), start)
    delta.parents = addressof(parent_array)
    for name, x in zip(("q", "k", "v", "decay", "beta"), inputs, strict=True):
        setattr(delta, name, None if x is None else x.data_ptr())
    delta.before, delta.changes, delta.out = matrix.data_ptr(), changes.data_ptr(), out.data_ptr()
    delta.after = None if after is None else after.data_ptr()
    if _kernel()(byref(delta), torch.get_num_threads()):
        raise OutOfMemory(f"there is no memory for the states of {len(parents)} rows", SMALLER)
