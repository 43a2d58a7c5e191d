"""Weight matrices in the layout of `product.h`, and the products and norms that run on the CPU kernels."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.activations import ACTIVATIONS
from paceline.kernels.cpu.build import kernel
from paceline.kernels.quantize import GROUP, Codes
from paceline.kernels.stored import FLOORS, FOUR_BITS, TYPES, Stored

LANES = 16
"""Outputs per block of weights."""

SMALLER = "Use a shorter prompt, a smaller draft or fewer requests at once"
"""Remedy for a pass that does not fit in memory."""

WIDE, EIGHT, EIGHT_AND_FLOOR, FOUR_AND_FLOOR = 16, 8, 9, 4


class CMatrix(Structure):
    """`Matrix` of product.h."""

    _fields_ = (("kind", c_int32), ("out", c_int32), ("width", c_int32), ("weights", c_void_p), ("bias", c_void_p))


class Matrix:
    """W [out, in] in blocks of 16 outputs, `in` padded to whole groups; with a bias or None."""

    def __init__(self, weight: Tensor | Codes | Stored, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        if isinstance(weight, Stored):
            self._codes = _codes_of(weight)
            self.packed = _pack_stored(weight, _kind(self._codes))
        else:
            self._codes = None if isinstance(weight, Tensor) else (weight.bits, weight.floor is not None)
            self.packed = _pack(weight) if isinstance(weight, Tensor) else _pack_codes(weight)
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()
        self.c = CMatrix(
            _kind(self._codes),
            self.shape[0],
            -(-self.shape[1] // GROUP) * GROUP,
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
        )

    def weight(self) -> Tensor:
        """W [out, in], bfloat16; of codes float32."""
        out, width = self.shape
        if self._codes is None:
            blocks = self.packed.view(-1, self.c.width // 2, LANES, 2)
            weight: Tensor = blocks.transpose(1, 2).reshape(-1, self.c.width)[:out, :width].contiguous()
            return weight
        return _unpack_codes(self.packed, self.shape, *self._codes).dequantised()

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


def _kind(codes: tuple[int, bool] | None) -> int:
    if codes is None:
        return WIDE
    bits, floor = codes
    return FOUR_AND_FLOOR if bits == 4 else EIGHT_AND_FLOOR if floor else EIGHT


def _codes_of(weight: Stored) -> tuple[int, bool] | None:
    """Bits of the codes that rows become, and whether with floors; None for floats."""
    kinds = set(weight.types.tolist())
    if kinds <= set(TYPES.values()):
        return None if weight.bits is None else (weight.bits, weight.bits == 4)
    return (4, True) if kinds <= FOUR_BITS else (8, bool(kinds & FLOORS))


def _pack_stored(weight: Stored, kind: int) -> Tensor:
    """As `_pack` and `_pack_codes`, by the kernels and straight from the rows, which are released."""
    out, width = weight.shape
    blocks, groups = -(-out // LANES), -(-width // GROUP)
    if kind == WIDE:
        packed = torch.empty(blocks, groups * GROUP // 2, LANES, 2, dtype=torch.bfloat16)
    else:
        bits, halves = (4, 2) if kind == FOUR_AND_FLOOR else (8, 1 + (kind == EIGHT_AND_FLOOR))
        packed = torch.empty(blocks, groups, LANES * (GROUP * bits // 8 + 2 * halves), dtype=torch.uint8)
    run = kernel("paceline_pack", *(c_int32,) * 3, *(c_void_p,) * 3, c_int32)
    rows, types = weight.rows.data_ptr(), weight.types.data_ptr()
    if run(kind, out, width, rows, types, packed.data_ptr(), torch.get_num_threads()):
        raise AssertionError(f"no way from types {set(weight.types.tolist())} to kind {kind}")
    weight.release()
    return packed


def _pack(weight: Tensor) -> Tensor:
    """[blocks, in / 2, 16, 2]: pairs of neighbouring inputs, one lane per output."""
    out, width = weight.shape
    filled = F.pad(weight.to(torch.bfloat16), (0, -width % GROUP, 0, -out % LANES))
    return filled.view(-1, LANES, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


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


def _unpack_codes(packed: Tensor, shape: tuple[int, int], bits: int, floor: bool) -> Codes:
    out, width = shape
    count = GROUP * LANES * bits // 8
    fours = packed[..., :count].unflatten(2, (-1, LANES, 4))
    if bits == 4:
        fours = torch.cat([fours & 15, fours >> 4], 2)
    codes = fours.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:out]
    numbers = packed[..., count:].contiguous().view(torch.float16).unflatten(2, (-1, LANES)).permute(2, 0, 3, 1)
    numbers = numbers.flatten(1, 2)[:, :out].contiguous()
    return Codes(codes.contiguous(), numbers[0], numbers[1] if floor else None, bits, width)


def check_rows(x: Tensor, width: int) -> None:
    """Raise `ValueError` for rows that a kernel would read beyond."""
    if x.device.type != "cpu":
        raise ValueError(f"rows on {x.device} where the weights are on the CPU")
    if x.shape[-1] != width:
        raise ValueError(f"rows of {x.shape[-1]} elements where the weights take {width}")


class NativeLinear:
    """A `kernels.linear.Linear` on the CPU: rows in bfloat16, or in any float dtype where the weights are codes."""

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
        """`weight` [2 * out, in]: gate above up. `out` must be a multiple of `LANES`."""
        self.out, self.activation = weight.shape[0] // 2, activation
        order = torch.arange(2 * self.out).view(2, -1, LANES).transpose(0, 1).flatten()
        self.both = NativeLinear(weight[order], None if bias is None else bias[order])

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).unflatten(-1, (-1, 2, LANES)).unbind(-2)
        y: Tensor = (ACTIVATIONS[self.activation](gate) * up).flatten(-2)
        return y


class NativeNorm:
    """A `models.layers.RMSNorm` for bfloat16 on the CPU, for rows that do not pass through a whole layer."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().contiguous(), eps
        self._run = kernel("paceline_norm", c_void_p, c_int32, c_int64, c_void_p, c_float, c_void_p)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether the kernel takes a norm of this weight."""
        return weight.device.type == "cpu" and weight.shape[-1] % LANES == 0

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), self._weight.shape[0]
        check_rows(x, size)
        if self._run(x.data_ptr(), size, x.numel() // size, self._weight.data_ptr(), self._eps, y.data_ptr()):
            raise OutOfMemory(f"no memory for a norm of {size} elements", SMALLER)
        return y
