"""Weight matrices in the layout of `product.h`, and the products and norms that run on the CPU kernels."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, cast
from dataclasses import replace

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

EIGHT, EIGHT_AND_FLOOR, FOUR_AND_FLOOR, STACKED, WIDE = 8, 9, 4, 1, 16
"""Kinds of formats.h; those of GGUF's types are known there only."""

FLOAT_KINDS = {torch.bfloat16: WIDE, torch.float16: 17, torch.float32: 32}
"""Float types that the kernels run, and their kinds."""


class CMatrix(Structure):
    """`Matrix` of product.h."""

    _fields_ = (("kind", c_int32), ("out", c_int32), ("width", c_int32), ("weights", c_void_p), ("bias", c_void_p))


class Matrix:
    """W [out, in] in blocks of 16 outputs, `in` padded to whole groups; with a bias or None."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()
        if isinstance(weight, Stored):
            self._parts = _pack_stored(weight)
        elif isinstance(weight, Codes):
            kind = FOUR_AND_FLOOR if weight.bits == 4 else EIGHT if weight.floor is None else EIGHT_AND_FLOOR
            self._parts = [(kind, weight.shape[0], _pack_codes(weight))]
        else:
            self._parts = [(FLOAT_KINDS[weight.dtype], weight.shape[0], _pack(weight))]
        width = -(-self.shape[1] // GROUP) * GROUP
        self._table = (CMatrix * len(self._parts))(
            *(CMatrix(kind, out, width, packed.data_ptr(), None) for kind, out, packed in self._parts)
        )
        kind, data = STACKED, cast(self._table, c_void_p).value
        if len(self._parts) == 1:
            kind, data = self._table[0].kind, self._table[0].weights
        self.c = CMatrix(kind, self.shape[0], width, data, None if self.bias is None else self.bias.data_ptr())

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each part."""
        return tuple(kind for kind, _, _ in self._parts)

    def weight(self) -> Tensor:
        """W [out, in] in its own float type; of codes float32."""
        packed = self._parts[0][2]
        if packed.dtype not in FLOAT_KINDS:
            return self.rows(torch.arange(self.shape[0]))
        out, width = self.shape
        n = 2 if packed.dtype == torch.bfloat16 else 1
        blocks = packed.view(-1, self.c.width // n, LANES, n)
        weight: Tensor = blocks.transpose(1, 2).reshape(-1, self.c.width)[:out, :width].contiguous()
        return weight

    def rows(self, indices: Tensor) -> Tensor:
        """These rows [..., in] of a matrix of codes, float32."""
        flat = indices.flatten().long().contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(f"rows must be from 0 to {self.shape[0] - 1}")
        y = torch.empty(len(flat), self.c.width)
        kernel("paceline_rows", POINTER(CMatrix), c_void_p, c_int64, c_void_p)(
            byref(self.c), flat.data_ptr(), len(flat), y.data_ptr()
        )
        return y[:, : self.shape[1]].view(*indices.shape, self.shape[1])

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, _, packed in self._parts)


def _pack_stored(weight: Stored) -> list[tuple[int, int, Tensor]]:
    """Kind, outputs and bytes of each run of blocks of one kind; in 8 bits where kinds meet within a block.

    Raises `CorruptModel` for a width that a type cannot have.
    """
    kinds = torch.empty_like(weight.types)
    for number in weight.types.unique().tolist():
        kinds[weight.types == number] = _kind(number, weight.bits)
    blocks = F.pad(kinds, (0, -len(kinds) % LANES), value=int(kinds[-1])).view(-1, LANES)
    if not torch.equal(blocks.amin(1), blocks.amax(1)):
        packed = [(EIGHT, weight.shape[0], _pack_codes(quantize(_plain(weight), 8)))]
    else:
        packed, first = [], 0
        for kind, count in zip(*(x.tolist() for x in blocks[:, 0].unique_consecutive(return_counts=True)), strict=True):
            rows = weight[first : first + count * LANES]
            packed.append((kind, len(rows.rows), _pack_rows(kind, rows)))
            first += count * LANES
    weight.release()
    return packed


def packs(number: int) -> bool:
    """Whether the kernels, which must be available, read this ggml type."""
    return _kind(number, None) != 0


def _kind(number: int, bits: int | None) -> int:
    """The kind of rows of this ggml type; `bits`: of the codes that floats become, or None."""
    if number in FLOATS.values():
        return WIDE if bits is None else EIGHT if bits == 8 else FOUR_AND_FLOOR
    return int(kernel("paceline_kind", c_int32)(number))


def _pack_rows(kind: int, weight: Stored) -> Tensor:
    """Rows of one kind, in its layout."""
    (out, width), size = weight.shape, kernel("paceline_bytes", c_int32, c_int32, c_int32)
    size.restype = c_int64
    floats = int(weight.types[0]) in FLOATS.values()
    whole = -(-width // GROUP) * GROUP if floats else width
    count = -(-out // LANES) * LANES * whole * 2 if kind == WIDE else size(kind, out, whole)
    packed = torch.empty(max(count, 0), dtype=torch.uint8)
    pack = kernel("paceline_pack", c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32)
    rows, types = weight.rows.data_ptr(), weight.types.data_ptr()
    if count < 0 or pack(kind, out, width, rows, types, packed.data_ptr(), torch.get_num_threads()):
        raise CorruptModel(
            f"a matrix of {out} x {width} cannot be of ggml types {weight.types.unique().tolist()}",
            "Fetch the file again",
        )
    return packed.view(torch.bfloat16) if kind == WIDE else packed


def _plain(weight: Stored) -> Tensor:
    """The weights in float32; each type by itself, since they meet within blocks."""
    y = torch.empty(weight.shape)
    for number in weight.types.unique().tolist():
        which = (weight.types == number).nonzero()[:, 0]
        if number in FLOATS.values():
            y[which] = read_floats(weight[which])
        else:
            y[which] = Matrix(replace(weight[which], mapped=False), None).weight()
    return y


def read_floats(weight: Stored) -> Tensor:
    """Rows of floats, in float32."""
    y = torch.empty(weight.shape)
    run = kernel("paceline_read_floats", c_void_p, c_void_p, c_int64, c_int32, c_void_p)
    run(weight.rows.data_ptr(), weight.types.data_ptr(), *weight.shape, y.data_ptr())
    return y


def _pack(weight: Tensor) -> Tensor:
    """[blocks, in / n, 16, n]: one lane per output; of bfloat16 n = 2 neighbouring inputs, else 1."""
    out, width = weight.shape
    filled = F.pad(weight, (0, -width % GROUP, 0, -out % LANES))
    n = 2 if weight.dtype == torch.bfloat16 else 1
    return filled.view(-1, LANES, filled.shape[1] // n, n).transpose(1, 2).contiguous()


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
    """act(x G^T) * (x U^T). Gate and up alternate, 16 outputs each, so that one kernel has both at hand."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None, activation: str) -> None:
        """`weight` [2 * out, in]: gate above up."""
        self.out, self.activation = weight.shape[0] // 2, activation
        whole = -(-self.out // LANES) * LANES  # whose last outputs are another's once more, and unused
        one = torch.arange(whole).clamp(max=self.out - 1)
        order = torch.stack([one, one + self.out]).view(2, -1, LANES).transpose(0, 1).flatten()
        self.both = NativeLinear(weight[order], None if bias is None else bias[order])

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).unflatten(-1, (-1, 2, LANES)).unbind(-2)
        y: Tensor = (ACTIVATIONS[self.activation](gate) * up).flatten(-2)
        return y[..., : self.out]


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
