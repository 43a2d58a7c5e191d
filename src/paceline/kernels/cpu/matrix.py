"""Weight matrices in the layout of `product.h`, and the products and norms that run on the CPU kernels."""

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
from paceline.kernels.activations import ACTIVATIONS
from paceline.kernels.cpu.build import kernel
from paceline.kernels.quantize import GROUP, Codes, quantize
from paceline.kernels.stored import FLOATS, Stored

LANES = 16
"""Outputs per block of weights."""

SMALLER = "Use a shorter prompt, a smaller draft or fewer requests at once"
"""Remedy for a pass that does not fit in memory."""

EIGHT, EIGHT_AND_FLOOR, FOUR_AND_FLOOR, STACKED, WIDE, IQ4_NL = 8, 9, 4, 1, 16, 84
"""Kinds of formats.h; those of GGUF's types are known there only."""

_UNIT = 256
"""Elements of a row that every kind can hold."""

FLOAT_KINDS = {torch.bfloat16: WIDE, torch.float16: 17, torch.float32: 32}
"""Float types that the kernels run, and their kinds."""
_FLOATS_OF = {kind: dtype for dtype, kind in FLOAT_KINDS.items()}
_CODE_KINDS = {8: EIGHT, 4: FOUR_AND_FLOOR}

_PIECE = 1 << 24
"""Bytes that are packed before the pages that they come from are given back."""


class CMatrix(Structure):
    """`Matrix` of product.h."""

    _fields_ = (("kind", c_int32), ("out", c_int32), ("width", c_int32), ("weights", c_void_p), ("bias", c_void_p))


class Matrix:
    """W [out, in] in blocks of 16 outputs, `in` padded to whole groups; with a bias or None."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()
        if isinstance(weight, Codes):
            kind = FOUR_AND_FLOOR if weight.bits == 4 else EIGHT if weight.floor is None else EIGHT_AND_FLOOR
            self._parts = [(kind, weight.shape[0], _pack_codes(weight))]
        else:
            own = weight if isinstance(weight, Stored) else Stored.floats(weight, weight.dtype)
            self._parts = _pack_stored(own)
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
        """W [out, in] in its own float type; of codes float32."""
        weight = torch.empty(self.shape, dtype=_FLOATS_OF.get(self.kinds[0], torch.float32))
        for some in torch.arange(self.shape[0]).split(_PIECE // 4 // self.c.width + 1):
            weight[some] = self.rows(some).to(weight.dtype)
        return weight

    def rows(self, indices: Tensor) -> Tensor:
        """These rows [..., in], float32."""
        flat = indices.flatten().long().contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(f"rows must be from 0 to {self.shape[0] - 1}")
        y = torch.empty(len(flat), self.c.width, dtype=torch.float32)
        kernel("paceline_rows", POINTER(CMatrix), c_void_p, c_int64, c_void_p)(
            byref(self.c), flat.data_ptr(), len(flat), y.data_ptr()
        )
        return y[:, : self.shape[1]].view(*indices.shape, self.shape[1])

    def first(self, outputs: int) -> Matrix:
        """The first `outputs` rows, or those of the first part, which share memory with this."""
        part, (kind, out, packed) = copy(self), self._parts[0]
        part.shape = (min(outputs, out), self.shape[1])
        part.c = CMatrix(kind, part.shape[0], self.c.width, packed.data_ptr(), self.c.bias)
        return part

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, _, packed in self._parts)


def _blocks(kind: int, out: int, packed: Tensor, width: int) -> Iterator[CMatrix]:
    """A packed matrix block by block."""
    count = -(-out // LANES)
    for block in range(count):
        rows, start = min(LANES, out - block * LANES), block * (packed.nbytes // count)
        yield CMatrix(kind, rows, width, packed.data_ptr() + start, None)


def _pack_stored(weight: Stored) -> list[tuple[int, int, Tensor]]:
    """Kind, outputs and bytes of each run of blocks of one type, or of floats; in 8 bits where a block is mixed.

    Raises `CorruptModel` for a width that a type cannot have.
    """
    if len(weight.kinds) == 1:
        return [_pack_run(weight)]
    wanted = _wanted(weight)
    converted = [number for number in weight.kinds if _converts(number, weight, wanted)]
    labels = np.where(np.isin(weight.types, converted), -1, weight.types)
    blocks = np.pad(labels, (0, -len(labels) % LANES), "edge").reshape(-1, LANES)
    if (blocks != blocks[:, :1]).any():
        codes = quantize(read_rows(weight), 8)
        weight.release()
        return [(EIGHT, weight.shape[0], _pack_codes(codes))]
    borders = [0, *(np.flatnonzero(np.diff(blocks[:, 0])) + 1).tolist(), len(blocks)]
    return [_pack_run(weight[a * LANES : b * LANES]) for a, b in pairwise(borders)]


def packs(number: int) -> bool:
    """Return whether the kernels, which must be available, read this ggml type."""
    return number in FLOATS.values() or _kind(number) != 0


def _kind(number: int) -> int:
    """The kind of rows of this ggml type, which is not one of floats; 0 for none."""
    return int(kernel("paceline_kind", c_int32)(number))


def block_elements(number: int) -> int:
    """Elements of a block of this ggml type, at whose borders rows may be cut; 1 for floats."""
    if number in FLOATS.values():
        return 1
    return GROUP if _bytes(_kind(number), LANES, GROUP) > 0 else _UNIT


def _wanted(weight: Stored) -> int:
    """The kind that rows become which do not stay as they are; 0: all stay."""
    if weight.form is None:
        return 0
    if weight.fewer and weight.form == 4:
        return fewest_bits()
    return _CODE_KINDS[weight.form] if isinstance(weight.form, int) else FLOAT_KINDS[weight.form]


def fewest_bits() -> int:
    """The kind of a draft model's matrices: IQ4_NL, half a bit less than `FOUR_AND_FLOOR`, where the library has byte
    dot products; without them it takes longer."""
    return int(kernel("paceline_fewest_bits")())


def _converts(number: int, weight: Stored, wanted: int) -> bool:
    """Return whether rows of this ggml type become of the wanted kind: codes of up to 5 bits stay what they are."""
    if number in FLOATS.values():
        return True
    most = FOUR_AND_FLOOR if wanted == IQ4_NL else wanted
    return weight.fewer and _bytes(_kind(number), LANES, _UNIT) > _bytes(most, LANES, _UNIT) > 0


def _bytes(kind: int, out: int, width: int) -> int:
    """Bytes of a matrix; -1 for a width that the kind cannot have."""
    size = kernel("paceline_bytes", c_int32, c_int32, c_int32)
    size.restype = c_int64
    return int(size(kind, out, width))


def _pack_run(weight: Stored) -> tuple[int, int, Tensor]:
    """Rows of one type, or all converted: their kind, their number, and they in its layout."""
    (out, width), first = weight.shape, int(weight.types[0])
    wanted = _wanted(weight)
    kind, whole = _kind(first), width
    if _converts(first, weight, wanted):
        kind, whole = wanted, -(-width // GROUP) * GROUP
    block = _bytes(kind, LANES, whole)
    if block <= 0:
        raise CorruptModel(f"a matrix of {out} x {width} cannot be of ggml type {first}", "Fetch the file again")
    packed = torch.empty(-(-out // LANES), block, dtype=torch.uint8)
    pack = kernel("paceline_pack", c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32)
    for blocks in packed.split(max(1, _PIECE // block)):
        start = (blocks.data_ptr() - packed.data_ptr()) // block * LANES
        part = weight[start : start + len(blocks) * LANES]
        rows, types = part.rows.ctypes.data, part.types.ctypes.data
        failed = pack(kind, len(part.rows), width, rows, types, blocks.data_ptr(), torch.get_num_threads())
        if failed == 2:
            raise OutOfMemory(f"no memory to pack a matrix of {out} x {width}", "Use a smaller model")
        if failed:
            numbers = sorted(set(part.types.tolist()))
            raise CorruptModel(f"a matrix of {out} x {width} cannot be of ggml types {numbers}", "Fetch the file again")
        weight.release()
    flat = packed.view(-1)
    return kind, out, flat.view(_FLOATS_OF[kind]) if kind in _FLOATS_OF else flat


def read_rows(weight: Stored) -> Tensor:
    """Rows of floats or codes, in float32."""
    y = torch.empty(weight.shape, dtype=torch.float32)
    run = kernel("paceline_read_rows", c_void_p, c_void_p, c_int64, c_int32, c_void_p)
    run(weight.rows.ctypes.data, weight.types.ctypes.data, *weight.shape, y.data_ptr())
    return y


def _pack_codes(weight: Codes) -> Tensor:
    """[blocks, groups, bytes]: a group's codes in fours, a lane per output, then 16 scales and, if any, 16 floors.

    With 4 bits, the low halves of the bytes are the codes of a group's first half.
    """
    spare = -weight.shape[0] % LANES
    fours = F.pad(weight.codes, (0, 0, 0, spare)).unflatten(1, (-1, GROUP // 4, 4)).unflatten(0, (-1, LANES))
    fours = fours.permute(0, 2, 3, 1, 4)  # [blocks, groups, 8, 16, 4]
    if weight.bits == 4:
        fours = fours[:, :, :4] | fours[:, :, 4:] << 4
    parts = [fours.flatten(2)]
    for numbers in (weight.scale, weight.floor):
        if numbers is not None:
            lanes = F.pad(numbers.half(), (0, 0, 0, spare)).unflatten(0, (-1, LANES)).transpose(1, 2)
            parts.append(lanes.contiguous().view(torch.uint8))
    return torch.cat(parts, -1).contiguous()


def check_rows(x: Tensor, width: int) -> None:
    """Raise `ValueError` for rows that a kernel would read beyond."""
    if x.device.type != "cpu":
        raise ValueError(f"rows on {x.device} where the weights are on the CPU")
    if x.shape[-1] != width:
        raise ValueError(f"rows of {x.shape[-1]} elements where the weights take {width}")


class NativeLinear:
    """A `kernels.linear.Linear` on the CPU, for rows in any float dtype; weights of bfloat16 round them to it."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.matrix = Matrix(weight, bias)
        self._run = kernel(
            *("paceline_linear", POINTER(CMatrix), c_void_p, c_int32, c_int32, c_void_p, c_int32),
            *(c_void_p, c_int32, c_void_p, c_int32),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.dtype == torch.bfloat16).to(x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        if not x.dtype == residual.dtype == torch.bfloat16:
            return residual + self(x)
        return self._product(x, True, residual.contiguous())

    def precise(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """The product in float32. `rows`, int64: the rows of x [..., in] to use, numbered through; the result of all
        others is undefined."""
        return self._product(x, False, rows=rows)

    def weight(self) -> Tensor:
        return self.matrix.weight()

    def first(self, outputs: int) -> NativeLinear:
        """The product for at most the first `outputs`, over the same weights."""
        part = copy(self)
        part.matrix = self.matrix.first(outputs)
        return part

    def _product(self, x: Tensor, narrow: bool, residual: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """In bfloat16 if `narrow`, else in float32."""
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
            raise OutOfMemory(f"no memory for a product of {count} rows", SMALLER)
        return y


class NativeGated:
    """`kernels.linear.gated`. Gate and up alternate, 16 outputs each, so that one kernel has both at hand."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None, activation: str) -> None:
        """`weight` [2 * out, in]: gate above up."""
        self.out, self.activation = weight.shape[0] // 2, activation
        whole = -(-self.out // LANES) * LANES  # whose last outputs are another's once more, and unused
        one = torch.arange(whole).clamp(max=self.out - 1)
        self.order = torch.stack([one, one + self.out]).view(2, -1, LANES).transpose(0, 1).flatten()
        self.both: Any = NativeLinear(weight[self.order], None if bias is None else bias[self.order])

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).unflatten(-1, (-1, 2, LANES)).unbind(-2)
        y: Tensor = ACTIVATIONS[self.activation](gate, up).flatten(-2)
        return y[..., : self.out]


def softcap_(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of float32 on the CPU, in place: with the same bits on every processor, unlike torch's."""
    if not x.is_contiguous() or x.dtype != torch.float32:
        raise ValueError(f"scores must be contiguous float32, got {x.dtype}")
    kernel("paceline_softcap", c_void_p, c_int64, c_float)(x.data_ptr(), x.numel(), cap)
    return x


class NativeNorm:
    """A `models.layers.RMSNorm` for bfloat16 on the CPU, for rows that do not pass through a whole layer."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._size, self._eps = weight.shape[0], eps
        self._weight = F.pad(weight.float(), (0, -weight.shape[0] % LANES)).contiguous()
        self._run = kernel("paceline_norm", c_void_p, c_int32, c_int64, c_void_p, c_float, c_void_p)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), self._size
        check_rows(x, size)
        if self._run(x.data_ptr(), size, x.numel() // size, self._weight.data_ptr(), self._eps, y.data_ptr()):
            raise OutOfMemory(f"no memory for a norm of {size} elements", SMALLER)
        return y
