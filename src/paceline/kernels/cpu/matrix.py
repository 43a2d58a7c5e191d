"""Weight matrices as the kernels of `product.h` read them, and their products."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.activations import ACTIVATIONS
from paceline.kernels.cpu.build import library
from paceline.kernels.quantize import GROUP, Codes

LANES = 16
"""Outputs of a block."""

SMALLER = "Use a shorter prompt, a smaller draft or fewer requests at once"
"""What to do when a pass finds no memory."""

WIDE, EIGHT, EIGHT_AND_FLOOR, FOUR_AND_FLOOR = 16, 8, 9, 4


class CMatrix(Structure):
    """`Matrix` of product.h."""

    _fields_ = (("kind", c_int32), ("out", c_int32), ("width", c_int32), ("weights", c_void_p), ("bias", c_void_p))


class Matrix:
    """W [out, in] in blocks of 16 outputs, `in` filled up to whole groups; with a bias or None."""

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
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


def _pack(weight: Tensor) -> Tensor:
    """[blocks, in / 2, 16, 2]: pairs of neighbouring inputs, a lane per output."""
    out, width = weight.shape
    filled = F.pad(weight.to(torch.bfloat16), (0, -width % GROUP, 0, -out % LANES))
    return filled.view(-1, LANES, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _pack_codes(weight: Codes) -> Tensor:
    """[blocks, groups, bytes]: a group's codes in fours, a lane per output, then 16 scales and perhaps 16 floors.

    Of 4 bits, codes of the first half of a group are the low ones of a byte.
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
    lines = numbers.flatten(1, 2)[:, :out].contiguous()
    return Codes(codes.contiguous(), lines[0], lines[1] if floor else None, bits, width)


def check_rows(x: Tensor, width: int) -> None:
    """Torch would refuse such rows; a kernel would read beyond them."""
    if x.device.type != "cpu":
        raise ValueError(f"rows on {x.device} where the weights are on the CPU")
    if x.shape[-1] != width:
        raise ValueError(f"rows of {x.shape[-1]} elements where the weights take {width}")


class NativeLinear:
    """See `runner.Linear`, on a CPU: rows in bfloat16, or in any other float dtype where the weights are codes."""

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None) -> None:
        self.matrix = Matrix(weight, bias)
        lib = library()
        assert lib is not None
        self._run = lib.paceline_linear
        self._run.argtypes = (
            *(POINTER(CMatrix), c_void_p, c_int32, c_int32, c_void_p, c_int32),
            *(c_void_p, c_int32, c_void_p, c_int32),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.dtype == torch.bfloat16).to(x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        if not x.dtype == residual.dtype == torch.bfloat16:
            return residual + self(x)
        return self._product(x, True, residual.contiguous())

    def precise(self, x: Tensor, lines: Tensor | None = None) -> Tensor:
        """`lines`, int64: the rows of x [..., in] that count, numbered through; what others give may be anything."""
        return self._product(x, False, lines=lines)

    def weight(self) -> Tensor:
        return self.matrix.weight()

    def _product(self, x: Tensor, narrow: bool, residual: Tensor | None = None, lines: Tensor | None = None) -> Tensor:
        """In bfloat16 if `narrow`, else in float32."""
        x = (x if x.dtype == torch.bfloat16 else x.float()).contiguous()
        width = self.matrix.shape[1]
        check_rows(x, width)
        rows = x.numel() // width if lines is None else len(lines)
        y = x.new_empty(*x.shape[:-1], self.matrix.shape[0], dtype=torch.bfloat16 if narrow else torch.float32)
        if rows and self._run(
            *(byref(self.matrix.c), x.data_ptr(), x.dtype == torch.float32, width),
            *(None if lines is None else lines.data_ptr(), rows),
            *(y.data_ptr(), not narrow, None if residual is None else residual.data_ptr(), torch.get_num_threads()),
        ):
            raise OutOfMemory(f"no memory for a product of {rows} rows", SMALLER)
        return y


class NativeGated:
    """See `runner.gated`. Gate and up lie in turns, 16 outputs each, so that one kernel has both at hand."""

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None, activation: str) -> None:
        """`weight` [2 * out, in]: gate above up. `out` must be whole lanes."""
        self.out, self.activation = weight.shape[0] // 2, activation
        order = torch.arange(2 * self.out).view(2, -1, LANES).transpose(0, 1).flatten()
        self.both = NativeLinear(weight[order], None if bias is None else bias[order])

    def __call__(self, x: Tensor) -> Tensor:
        left, right = self.both(x).unflatten(-1, (-1, 2, LANES)).unbind(-2)
        y: Tensor = (ACTIVATIONS[self.activation](left) * right).flatten(-2)
        return y
