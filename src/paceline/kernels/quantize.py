"""Quantised weights, which are small integers with a scale per group, and activations that are rounded in the same way.

The groups are as large as in GGUF's 4-bit and 8-bit types, so one kernel is enough for each number of bits. Activations
are rounded to 8 bits in the same groups. The sum of a group then consists of integers, so it does not depend on the
order of addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from paceline.errors import InvalidOption

Precision = Literal["auto", "none", "int8", "int4"]
"""Requested quantisation. `auto` keeps the codes of a GGUF file if this machine has kernels for them, and uses floats
otherwise."""

Mode = Literal["int8", "int4"]
"""The quantisation of matrices that the file stores as floats."""

GROUP = 32
"""Number of weights that share a scale."""

ZERO_POINT = {4: 0, 8: 128}
"""Number of bits -> the code of a weight that equals the group's offset, or 0 if there is no offset."""

_CHUNK_WEIGHTS = 1 << 18
"""Number of weights that are quantised at a time. A chunk fits into the processor's cache, so quantising takes a
third less time."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantised weight matrix [out, in]: w = scale * (code - zero point) + offset, in groups of `GROUP` per row.

    GGUF's Q4_1 has this form with 4 bits, Q4_0 with 4 bits and offset = -8 * scale, and Q8_0 with 8 bits and no offset.

    Attributes:
        codes: uint8 [out, `width` padded to a multiple of GROUP], one code per byte. With 4 bits: 0 to 15, zero point
            0. With 8 bits: 0 to 255, zero point 128. The padding may have any value.
        scale: float16 [out, groups].
        offset: float16 [out, groups]. It may be None with 8 bits.
        bits: 4 or 8.
        width: Number of columns, without the padding.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.width

    def __getitem__(self, rows: Tensor | slice) -> Codes:
        """Return these output rows, in this order."""
        offset = None if self.offset is None else self.offset[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], offset=offset)

    def columns(self, first: int, end: int) -> Codes:
        """Return the columns from `first` up to, but not including, `end`. `first` must be a multiple of `GROUP`. If
        `end` is not, the other columns of its group become padding."""
        groups = slice(first // GROUP, -(-end // GROUP))
        offset = None if self.offset is None else self.offset[:, groups]
        codes = self.codes[:, groups.start * GROUP : groups.stop * GROUP]
        return replace(self, codes=codes, scale=self.scale[:, groups], offset=offset, width=end - first)

    def to(self, device: torch.device) -> Codes:
        offset = None if self.offset is None else self.offset.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), offset=offset)

    def centred_codes(self, groups: int | slice = slice(None)) -> Tensor:
        """Return code - zero point for these groups, float32 [out, groups, GROUP], or [out, GROUP] for one group."""
        chosen: Tensor = self.codes.unflatten(1, (-1, GROUP))[:, groups]
        return chosen.float() - ZERO_POINT[self.bits]

    def dequantised(self) -> Tensor:
        """Return the weights [out, in] in float32."""
        weight = self.centred_codes() * self.scale.float()[..., None]
        if self.offset is not None:
            weight += self.offset.float()[..., None]
        return weight.flatten(1)[:, : self.width]

    def to_8_bits(self) -> Codes:
        """Return the same weights, bit for bit, as 8-bit codes."""
        if self.bits == 8:
            return self
        return replace(self, codes=self.codes + ZERO_POINT[8], bits=8)


def stack(parts: Sequence[Codes]) -> Codes:
    """Stack matrices of the same width along the outputs, without rounding.

    If the parts have different numbers of bits, the result has 8 bits. It has an offset if any part has one.
    """
    if len(parts) == 1:
        return parts[0]
    if len({part.bits for part in parts}) > 1:
        parts = [part.to_8_bits() for part in parts]
    offset = None
    if any(part.offset is not None for part in parts):
        offset = torch.cat([torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts])
    codes, scale = torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts])
    return Codes(codes, scale, offset, parts[0].bits, parts[0].width)


def check_precision(precision: str, name: str = "quantize") -> None:
    """Raise `InvalidOption` if `precision` is not a `Precision`. `name`: The option's name, for the message."""
    if precision not in get_args(Precision):
        raise InvalidOption(f"{name} must be auto, none, int8 or int4, got {precision!r}", "Choose one of these")


def quantize(weight: Tensor, bits: int) -> Codes:
    """Quantise a matrix to the nearest codes.

    With 8 bits, the largest magnitude of a group becomes 127 times the scale, and there is no offset. With 4 bits, the
    codes span about the range from the group's smallest to its largest weight. Scale and offset are rounded to float16
    before the codes are chosen.

    Args:
        weight: [out, in], any float dtype.
        bits: 4 or 8.
    """
    rows = max(1, _CHUNK_WEIGHTS // max(1, weight.shape[1]))
    return stack([_quantize(piece, bits) for piece in weight.split(rows)])


def _quantize(weight: Tensor, bits: int) -> Codes:
    width = weight.shape[1]
    # Pad with copies of the last column, so that the padding does not change a group's range.
    filled = torch.cat([weight, weight[:, -1:].expand(-1, -width % GROUP)], 1).float()
    groups = filled.unflatten(1, (-1, GROUP))
    codes, scale, offset = _four_bits(groups) if bits == 4 else _eight_bits(groups)
    return Codes(
        codes.to(torch.uint8).flatten(1), scale[..., 0], None if offset is None else offset[..., 0], bits, width
    )


Fit = tuple[Tensor, Tensor, Tensor | None]
"""The codes as floats [out, groups, GROUP], and the scale and the offset as float16 [out, groups, 1]."""


def _eight_bits(groups: Tensor) -> Fit:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    return _nearest(groups, scale, -127, 127) + ZERO_POINT[8], scale, None


_FITS = 4
"""Number of rounds of fitting. Four rounds reduce the squared error by 14 %, which is twice as much as a search for the
best range."""


def _four_bits(groups: Tensor) -> Fit:
    """Start with codes that span the smallest to the largest weight. Then alternate between fitting a line to the codes
    and choosing the nearest codes."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, offset = (high - low) / 15, low
    for _ in range(_FITS):
        scale, offset = _line(_nearest(groups - offset, scale, 0, 15), groups)
    scale, offset = scale.half(), offset.half()
    return _nearest(groups - offset, scale, 0, 15), scale, offset


def _nearest(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Divide values by `scale`, and round to integers within the bounds. Where the scale is 0, the result is 0."""
    divisor = scale.float()
    return (values / divisor.masked_fill(divisor == 0, torch.inf)).round_().clamp_(least, most)


def _line(codes: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and offset with the least squared error for these codes."""
    middle, mean = codes.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    off = codes - middle
    scale = (off * groups).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True).clamp_(min=1e-9)
    return scale, mean - scale * middle


class Rounded(NamedTuple):
    """Activations rounded to 8 bits.

    Every row has its own scales. If a tensor had a single scale, a drafted row would change all other rows.

    Attributes:
        codes: Whole numbers from -127 to 127, float32 [..., groups, GROUP].
        scale: float32 [..., groups].
    """

    codes: Tensor
    scale: Tensor

    def values(self, width: int) -> Tensor:
        """Return the rounded activations, float32 [..., width]."""
        return (self.codes * self.scale[..., None]).flatten(-2)[..., :width]


def round_activations(x: Tensor) -> Rounded:
    """Round rows to 8 bits: the largest magnitude of each group becomes 127 times its scale, and ties round to even.

    Groups of zeros stay zero. A non-finite value makes the scale of its group non-finite.

    Args:
        x: [..., in], any float dtype.
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    # The bound keeps the inverse finite. Values below it have no effect, because float16 scales keep weights far below
    # 1e30.
    largest = groups.abs().amax(-1).clamp(min=1e-30)
    # Divide as the kernels do: torch computes `127 / largest` as 127 times a rounded inverse.
    inverse = torch.full_like(largest, 127).div_(largest)
    return Rounded((groups * inverse[..., None]).round_(), largest / 127)
