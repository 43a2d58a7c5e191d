"""Weight matrices in the layout of `formats.h`, with the linear layers and norms that run on the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import CorruptModel, OutOfMemory
from paceline.kernels.cpu.build import kernel
from paceline.kernels.quantize import GROUP, Codes, quantize
from paceline.kernels.stored import FLOATS, Stored

LANES = 16
"""Outputs per block of weights."""

SMALLER = "Use a shorter prompt, a smaller draft or fewer requests at once"
"""Remedy for a pass that does not fit in memory."""

INT8, INT8_OFFSET, INT4_OFFSET, STACKED, BF16, IQ4_NL = 8, 9, 4, 1, 16, 84
"""Kinds (formats) of matrices, as numbered by `Kind` in formats.h. It also numbers the formats of GGUF's types."""

_UNIT = 256
"""A row width that every kind supports."""

_TANH = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), 2)
ACTIVATION_KINDS = {"silu": 0, "gelu": 1, **_TANH, "clamped_swiglu": 3, "relu2": 4}
"""Activations (`kernels/activations.py`), as numbered in functions.h."""

FLOAT_KINDS = {torch.bfloat16: BF16, torch.float16: 17, torch.float32: 32}
"""Float types that the kernels support -> their kinds."""
KV_KINDS = {**FLOAT_KINDS, torch.int8: INT8}
"""Types of keys and values that the kernels support -> their kinds."""
_FLOATS_OF = {kind: dtype for dtype, kind in FLOAT_KINDS.items()}
_CODE_KINDS = {8: INT8, 4: INT4_OFFSET}

_PIECE = 1 << 24
"""Bytes to pack before the mapped pages that they come from are released."""


def fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a C structure, in order. Each group is a type and its names."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class CMatrix(Structure):
    """The structure `Matrix` in inputs.h."""

    _fields_ = fields((c_int32, "kind out width"), (c_void_p, "weights bias"))


class Matrix:
    """W [out, in] in blocks of 16 outputs, with `in` padded to whole groups, and an optional bias."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()
        if isinstance(weight, Codes):
            kind = INT4_OFFSET if weight.bits == 4 else INT8 if weight.offset is None else INT8_OFFSET
            self._parts = [(kind, weight.shape[0], _pack_codes(weight))]
        else:
            stored = weight if isinstance(weight, Stored) else Stored.floats(weight, weight.dtype)
            self._parts = _pack_stored(stored)
        width = -(-self.shape[1] // GROUP) * GROUP
        if len(self._parts) == 1:
            kind, _, packed = self._parts[0]
            data = packed.data_ptr()
        else:
            blocks = [block for part in self._parts for block in _blocks(*part, width)]
            self._table = (CMatrix * len(blocks))(*blocks)
            kind, data = STACKED, addressof(self._table)
        self.c = CMatrix(kind, self.shape[0], width, data, None if self.bias is None else self.bias.data_ptr())

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each part."""
        return tuple(kind for kind, _, _ in self._parts)

    def weight(self) -> Tensor:
        """Return W [out, in] in its own float type, or in float32 if it is quantised."""
        weight = torch.empty(self.shape, dtype=_FLOATS_OF.get(self.kinds[0], torch.float32))
        for some in torch.arange(self.shape[0]).split(_PIECE // 4 // self.c.width + 1):
            weight[some] = self.rows(some).to(weight.dtype)
        return weight

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows with these indices, float32 [..., in].

        Raises:
            IndexError: If an index is out of range.
        """
        flat = indices.flatten().long().contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(
                f"row indices must be from 0 to {self.shape[0] - 1}, got {int(flat.min())} to {int(flat.max())}"
            )
        y = torch.empty(len(flat), self.c.width, dtype=torch.float32)
        kernel("paceline_rows", POINTER(CMatrix), c_void_p, c_int64, c_void_p)(
            byref(self.c), flat.data_ptr(), len(flat), y.data_ptr()
        )
        return y[:, : self.shape[1]].view(*indices.shape, self.shape[1])

    def first(self, outputs: int) -> Matrix:
        """Return at most the first `outputs` rows, without copying them, limited to the first part of the matrix."""
        part, (kind, out, packed) = copy(self), self._parts[0]
        part.shape = (min(outputs, out), self.shape[1])
        part.c = CMatrix(kind, part.shape[0], self.c.width, packed.data_ptr(), self.c.bias)
        return part

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, _, packed in self._parts)


def _blocks(kind: int, out: int, packed: Tensor, width: int) -> Iterator[CMatrix]:
    """Yield the blocks of a packed matrix, each as a matrix of its own."""
    count = -(-out // LANES)
    for block in range(count):
        rows, start = min(LANES, out - block * LANES), block * (packed.nbytes // count)
        yield CMatrix(kind, rows, width, packed.data_ptr() + start, None)


def _pack_stored(weight: Stored) -> list[tuple[int, int, Tensor]]:
    """Pack rows into runs of blocks that have the same format.

    If a block contains rows of different types, the whole matrix is converted to 8 bits.

    Returns:
        Kind, number of outputs and packed bytes of each run.

    Raises:
        CorruptModel: If a type does not support the width of the matrix.
    """
    if len(weight.kinds) == 1:
        return [_pack_run(weight)]
    target = _target_kind(weight)
    converted = [number for number in weight.kinds if _converts(number, weight, target)]
    labels = np.where(np.isin(weight.types, converted), -1, weight.types)
    blocks = np.pad(labels, (0, -len(labels) % LANES), "edge").reshape(-1, LANES)
    if (blocks != blocks[:, :1]).any():
        codes = quantize(read_rows(weight), 8)
        weight.release()
        return [(INT8, weight.shape[0], _pack_codes(codes))]
    borders = [0, *(np.flatnonzero(np.diff(blocks[:, 0])) + 1).tolist(), len(blocks)]
    return [_pack_run(weight[a * LANES : b * LANES]) for a, b in pairwise(borders)]


def packs(number: int) -> bool:
    """Return True if the kernels can read this ggml type. The kernels must be available."""
    return number in FLOATS.values() or _kind(number) != 0


def _kind(number: int) -> int:
    """Return the kind that holds this ggml type of codes unchanged, or 0 if there is none."""
    return int(kernel("paceline_kind", c_int32)(number))


def block_elements(number: int) -> int:
    """Return the number of elements in a block of this ggml type (1 for floats). Rows may be cut between blocks."""
    if number in FLOATS.values():
        return 1
    return GROUP if _bytes(_kind(number), LANES, GROUP) > 0 else _UNIT


def _target_kind(weight: Stored) -> int:
    """Return the kind to which rows are converted, or 0 if all rows keep their type."""
    if weight.target is None:
        return 0
    if weight.requantises and weight.target == 4:
        return fewest_bits()
    return _CODE_KINDS[weight.target] if isinstance(weight.target, int) else FLOAT_KINDS[weight.target]


def fewest_bits() -> int:
    """Return the kind for matrices of draft models.

    It is IQ4_NL, which has half a bit less than `INT4_OFFSET`, if the processor has byte dot products. Without them,
    IQ4_NL is slower.
    """
    return int(kernel("paceline_fewest_bits")())


def _converts(number: int, weight: Stored, target: int) -> bool:
    """Return True if rows of this ggml type are converted to the kind `target`.

    Floats are always converted. Codes are converted only if `weight.requantises` is set and they take more bytes.
    """
    if number in FLOATS.values():
        return True
    most = INT4_OFFSET if target == IQ4_NL else target
    return weight.requantises and _bytes(_kind(number), LANES, _UNIT) > _bytes(most, LANES, _UNIT) > 0


def _bytes(kind: int, out: int, width: int) -> int:
    """Return the bytes of a matrix, or -1 if the kind does not support the width."""
    size = kernel("paceline_bytes", c_int32, c_int32, c_int32)
    size.restype = c_int64
    return int(size(kind, out, width))


def _pack_run(weight: Stored) -> tuple[int, int, Tensor]:
    """Pack rows that all have the same type or are all converted. Return their kind, their number and packed bytes."""
    (out, width), first = weight.shape, int(weight.types[0])
    target = _target_kind(weight)
    kind, padded_width = _kind(first), width
    if _converts(first, weight, target):
        kind, padded_width = target, -(-width // GROUP) * GROUP
    block = _bytes(kind, LANES, padded_width)
    if block <= 0:
        raise CorruptModel(
            f"ggml type {first} does not support a matrix of {out} x {width}", "Download the model file again"
        )
    packed = torch.empty(-(-out // LANES), block, dtype=torch.uint8)
    pack = kernel("paceline_pack", c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32)
    for blocks in packed.split(max(1, _PIECE // block)):
        start = (blocks.data_ptr() - packed.data_ptr()) // block * LANES
        part = weight[start : start + len(blocks) * LANES]
        rows, types = part.rows.ctypes.data, part.types.ctypes.data
        failed = pack(kind, len(part.rows), width, rows, types, blocks.data_ptr(), torch.get_num_threads())
        if failed == 2:
            raise OutOfMemory(f"there is no memory to pack a matrix of {out} x {width}", "Use a smaller model")
        if failed:
            numbers = sorted(set(part.types.tolist()))
            raise CorruptModel(
                f"ggml types {numbers} do not support a matrix of {out} x {width}", "Download the model file again"
            )
        weight.release()
    flat = packed.view(-1)
    return kind, out, flat.view(_FLOATS_OF[kind]) if kind in _FLOATS_OF else flat


def read_rows(weight: Stored) -> Tensor:
    """Read rows of floats or codes as float32 [out, in]."""
    y = torch.empty(weight.shape, dtype=torch.float32)
    run = kernel("paceline_read_rows", c_void_p, c_void_p, c_int64, c_int32, c_void_p)
    run(weight.rows.ctypes.data, weight.types.ctypes.data, *weight.shape, y.data_ptr())
    return y


def _pack_codes(weight: Codes) -> Tensor:
    """Pack codes as uint8 [blocks, groups, bytes].

    A group consists of its codes in fours with a lane for each output, then 16 scales, and 16 offsets if there are any.
    With 4 bits, the low half of each byte is a code of the group's first half.
    """
    spare = -weight.shape[0] % LANES
    fours = F.pad(weight.codes, (0, 0, 0, spare)).unflatten(1, (-1, GROUP // 4, 4)).unflatten(0, (-1, LANES))
    fours = fours.permute(0, 2, 3, 1, 4)  # [blocks, groups, 8, 16, 4]
    if weight.bits == 4:
        fours = fours[:, :, :4] | fours[:, :, 4:] << 4
    parts = [fours.flatten(2)]
    for numbers in (weight.scale, weight.offset):
        if numbers is not None:
            lanes = F.pad(numbers.half(), (0, 0, 0, spare)).unflatten(0, (-1, LANES)).transpose(1, 2)
            parts.append(lanes.contiguous().view(torch.uint8))
    return torch.cat(parts, -1).contiguous()


def check_rows(x: Tensor, width: int) -> None:
    """Raise `ValueError` unless x is on the CPU and has `width` columns: a kernel would read past its end."""
    if x.device.type != "cpu":
        raise ValueError(f"activations must be on the CPU, where the weights are, got {x.device}")
    if x.shape[-1] != width:
        raise ValueError(f"activations must have {width} elements per row, got {x.shape[-1]}")


class NativeLinear:
    """A linear layer (`kernels.linear.Linear`) on the CPU, for rows of any float dtype.

    With bfloat16 weights, the rows are rounded to bfloat16.
    """

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.matrix = Matrix(weight, bias)
        self._run = kernel(
            *("paceline_linear", POINTER(CMatrix), c_void_p, c_int32, c_int32, c_void_p, c_int32),
            *(c_void_p, c_int32, c_void_p, c_int32),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.dtype == torch.bfloat16).to(x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        if not x.dtype == residual.dtype == torch.bfloat16:
            return residual + self(x)
        return self._multiply(x, True, residual.contiguous())

    def precise(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return x W^T + b in float32.

        Args:
            x: [..., in].
            rows: Indices into x viewed as [rows, in], int64; None computes all rows. All other rows of the result are
                undefined.
        """
        return self._multiply(x, False, rows=rows)

    def weight(self) -> Tensor:
        return self.matrix.weight()

    def first(self, outputs: int) -> NativeLinear:
        """Return a linear layer with at most the first `outputs` outputs, without copying weights."""
        part = copy(self)
        part.matrix = self.matrix.first(outputs)
        return part

    def _multiply(self, x: Tensor, narrow: bool, residual: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Return x W^T + b (+ residual), in bfloat16 if `narrow`, else in float32."""
        x = (x if x.dtype == torch.bfloat16 else x.float()).contiguous()
        width = self.matrix.shape[1]
        check_rows(x, width)
        count = x.numel() // width if rows is None else len(rows)
        y = x.new_empty(*x.shape[:-1], self.matrix.shape[0], dtype=torch.bfloat16 if narrow else torch.float32)
        if count and self._run(
            *(byref(self.matrix.c), x.data_ptr(), x.dtype == torch.float32, width),
            *(None if rows is None else rows.data_ptr(), count),
            *(y.data_ptr(), not narrow, None if residual is None else residual.data_ptr(), torch.get_num_threads()),
        ):
            raise OutOfMemory(f"there is no memory for a matrix multiplication of {count} rows", SMALLER)
        return y


class NativeHeadLinear:
    """See `kernels.linear.head_linear`, on the CPU, for rows of any float dtype."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [heads, out, in]. `out` must be a multiple of `LANES`."""
        self._heads, self._out, self._in = weight.shape
        self._matrix = Matrix(weight.flatten(0, 1), None)
        self._run = kernel(
            *("paceline_head_linear", POINTER(CMatrix), c_int32, c_void_p, c_int32, c_int32, c_int32),
            *(c_void_p, c_int32),
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        check_rows(x, self._in)
        if x.shape[-2] != self._heads:
            raise ValueError(f"activations must have {self._heads} heads, got {x.shape[-2]}")
        y, rows = x.new_empty(*x.shape[:-1], self._out), x.shape[:-2].numel()
        if self._run(
            *(byref(self._matrix.c), self._heads, x.data_ptr(), FLOAT_KINDS[x.dtype], self._in, rows),
            *(y.data_ptr(), torch.get_num_threads()),
        ):
            raise OutOfMemory(f"there is no memory for a matrix multiplication of {rows} rows", SMALLER)
        return y


class NativeGated:
    """Gated linear layers (`kernels.linear.gated`) on the CPU.

    Attributes:
        linear: Computes the gate and up projections together. Blocks of 16 gate and 16 up outputs alternate, so that
            one kernel sees both.
        order: For each output of `linear`, its row in the stacked projections.
        out: Number of outputs of each projection.
    """

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None, activation: str) -> None:
        """Pack `weight` [2 * out, in], the gate projection followed by the up projection."""
        self.out, self.activation = weight.shape[0] // 2, activation
        padded = -(-self.out // LANES) * LANES  # the padding repeats the last output, and is never used
        gate = torch.arange(padded).clamp(max=self.out - 1)
        self.order = torch.stack([gate, gate + self.out]).view(2, -1, LANES).transpose(0, 1).flatten()
        self.linear: Any = NativeLinear(weight[self.order], None if bias is None else bias[self.order])

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self.linear.precise(x)
        blocks = gate_up.shape[-1] // 2 // LANES
        y = gate_up.new_empty(*x.shape[:-1], blocks * LANES)
        run = kernel("paceline_gated", c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32)
        rows = y.numel() // y.shape[-1]
        run(gate_up.data_ptr(), ACTIVATION_KINDS[self.activation], rows, blocks, y.data_ptr(), torch.get_num_threads())
        gated: Tensor = y[..., : self.out].to(x.dtype)
        return gated


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Replace x by cap * tanh(x / cap), in place. Unlike torch, this gives the same bits on every processor.

    Raises:
        ValueError: If x is not contiguous float32.
    """
    if not x.is_contiguous() or x.dtype != torch.float32:
        layout = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(f"scores must be contiguous float32, got {layout} {x.dtype}")
    kernel("paceline_softcap", c_void_p, c_int64, c_float)(x.data_ptr(), x.numel(), cap)
    return x


class NativeNorm:
    """A `models.norms.RMSNorm` on the CPU, for norms outside of native layers."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._size, self._eps = weight.shape[0], eps
        self._weight = F.pad(weight.float(), (0, -weight.shape[0] % LANES)).contiguous()
        self._run = kernel("paceline_norm", c_void_p, c_int32, c_int32, c_int64, c_void_p, c_float, c_void_p)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), self._size
        check_rows(x, size)
        shape = FLOAT_KINDS[x.dtype], size, x.numel() // size
        if self._run(x.data_ptr(), *shape, self._weight.data_ptr(), self._eps, y.data_ptr()):
            raise OutOfMemory(f"there is no memory for a norm of {size} elements", SMALLER)
        return y
