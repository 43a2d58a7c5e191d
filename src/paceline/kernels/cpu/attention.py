"""Attention by the CPU kernels: the C structures of a pass's slots, and the call for one layer.

Native layers (`models.cpu_layers`) compute attention within their own call. The call here is for layers that torch
computes. With it, a row's bits do not depend on other rows. With torch's own attention they would, because torch
chooses between two orders of summation by the size of a matrix multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.attention import LayerAttention, SlabPlan
from paceline.cache.kv_types import size_of
from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import kernel, library
from paceline.kernels.cpu.matrix import FLOAT_KINDS, KV_KINDS, LANES, SMALLER, fields

_WIDEST = 1 << 30
"""A window that exceeds any text and still fits into the kernels' 32-bit integers."""


class CHeads(Structure):
    """The structure `Heads` in attention.h."""

    _fields_ = fields((c_int32, "query_heads kv_heads padded_dim"), (c_float, "scale softcap"), (c_void_p, "sinks"))


class _CSlot(Structure):
    """The structure `Slot` in attention.h."""

    _fields_ = fields(
        (c_void_p, "keys values"),
        (c_int64, "layer_stride capacity length"),
        (c_int32, "first rows columns skipped store_count copy_count"),
        (c_void_p, "stores copies visible row_depth column_depth"),
    )


class CView(Structure):
    """The structure `View` in attention.h."""

    _fields_ = fields((c_int32, "window chunked kind"), (POINTER(_CSlot), "slots"))


class _AttendArguments(Structure):
    """The structure `AttendArguments` in layers.cpp."""

    _fields_ = fields(
        (POINTER(CView), "view"),
        (POINTER(CHeads), "heads"),
        (c_void_p, "indices q k v output"),
        (c_int32, "slots rows layer head_dim threads"),
    )


def padded_size(size: int) -> int:
    """Round a head size up to whole SIMD lanes, as the kernels store heads."""
    return -(-size // LANES) * LANES


def attends_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels can compute attention for a stream of this dtype on this device."""
    return device.type == "cpu" and dtype in FLOAT_KINDS and library() is not None


class KernelView:
    """The slots of a pass in the layers of one slab, in the kernels' own structures (`c`)."""

    def __init__(self, plans: Sequence[SlabPlan]) -> None:
        """`plans` of one kind of attention together hold all slots of the pass, in order."""
        rows = plans[0].rows
        self._first_rows = list(accumulate(rows.counts, initial=0))
        self.count, self.rows = len(rows.slots), self._first_rows[-1]
        self.row_indices = (c_int64 * self.rows)(*rows.lines)
        slots = [slot for plan in plans for slot in self._slots(plan)]
        first = plans[0]
        self.c = CView(
            *(min(first.window or 0, _WIDEST), first.chunked and first.window is not None),
            *(KV_KINDS[first.tensors[0].dtype], (_CSlot * len(slots))(*slots)),
        )

    def _slots(self, plan: SlabPlan) -> Iterator[_CSlot]:
        keys, values = plan.tensors[0], plan.tensors[-1]
        layer_stride, place_bytes, counts = keys.stride(0), keys.stride(1) * keys.element_size(), plan.rows.counts
        for i, place, length, x in zip(plan.members, plan.places, plan.lengths, plan.layouts, strict=True):
            yield _CSlot(
                *(
                    keys.data_ptr() + place * place_bytes,
                    values.data_ptr() + place * place_bytes,
                    layer_stride,
                    keys.shape[3],
                    length,
                ),
                *(self._first_rows[i], counts[i], len(x.rows), 0, len(x.stores), len(x.copies)),
                *(t.data_ptr() for t in (x.stores, x.copies, x.visible, x.row_depths, x.column_depths)),
            )


def attend(
    plans: Sequence[SlabPlan],
    index: int,
    spec: LayerAttention,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """Store keys and values of a pass and compute the attention of its rows in one layer.

    Args:
        plans: The plans of the layer's slab. Together they hold all slots of the pass, in order.
        index: Index of the layer within the slab.
        spec: Attention of the layer.
        q: Queries [B, T, heads, D].
        k: Keys [B, T, kv_heads, D]. None if the layer stores none.
        v: Values, in the same shape. Ignored if the keys are also the values.

    Returns:
        [B, T, heads * D].

    Raises:
        OutOfMemory: If there is no memory for the intermediate results.
    """
    view = plans[0].kernel_view
    if not isinstance(view, KernelView):
        view = plans[0].kernel_view = KernelView(plans)
    stored = plans[0].tensors
    inputs = [x if x is None else x.contiguous() for x in (q, k, None if spec.single else v)]
    b, t, heads, size = q.shape
    output = q.new_empty(b, t, heads * size)
    sinks = None if spec.sinks is None else F.pad(spec.sinks.float(), (0, -heads % LANES)).contiguous()
    call = _AttendArguments(
        *(POINTER(CView)(view.c), POINTER(CHeads)(_heads(spec, heads, stored[0], sinks)), addressof(view.row_indices)),
        *(None if x is None else x.data_ptr() for x in (*inputs, output)),
        *(view.count, view.rows, index, size, torch.get_num_threads()),
    )
    if kernel("paceline_attend", c_void_p, c_int32)(byref(call), FLOAT_KINDS[q.dtype]):
        raise OutOfMemory(f"not enough memory for a pass of {view.rows} rows", SMALLER)
    # A padding row repeats the first row's token. With the same attention output it also chooses the same experts, so a
    # mixture-of-experts layer reads no extra weights.
    for i, count in enumerate(plans[0].rows.counts):
        output[i, count:] = output[i, :1]
    return output


def _heads(spec: LayerAttention, heads: int, keys: Tensor, sinks: Tensor | None) -> CHeads:
    address = None if sinks is None else sinks.data_ptr()
    return CHeads(heads, keys.shape[2], size_of(keys), spec.scale, spec.softcap or 0.0, address)
