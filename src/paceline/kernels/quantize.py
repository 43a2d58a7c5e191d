"""Quantised weights: small integers with a scale per group, and activations rounded to match.

The groups are those of GGUF's 4- and 8-bit types, so that a product needs one kernel per number of bits: with
activations rounded to 8 bits in the same groups, a group's sum is one of integers, which does not depend on the order
of addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from paceline.errors import InvalidOption

Precision = Literal["auto", "none", "int8", "int4"]
"""Requested quantisation. auto: a GGUF's own codes where this machine has kernels for them, else floats."""

Mode = Literal["int8", "int4"]
"""How matrices are held that have no codes of their own."""

GROUP = 32
CENTRE = {4: 0, 8: 128}
"""Bits -> the code that means the floor (zero, if there is none)."""

_PIECE = 1 << 18
"""Weights quantised at a time: few enough for the processor's cache, which makes it a third faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight matrix [out, in] in groups of `GROUP` along its rows: w = scale * (code - centre) + floor.

    `codes`: uint8 [out, in padded to a multiple of GROUP]; bits 4: 0 to 15, centre 0; bits 8: 0 to 255, centre 128.
    The padding means nothing. `scale`: float16 [out, groups]. `floor`: float16 [out, groups], or None (never with 4
    bits). `width`: in.

    GGUF's Q4_1 is 4 bits as they are, Q4_0 has floor = -8 scale, Q8_0 is 8 bits without a floor.
    """

    codes: Tensor
    scale: Tensor
    floor: Tensor | None
    bits: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.width

    def __getitem__(self, rows: Tensor | slice) -> Codes:
        """These output rows, in this order."""
        floor = None if self.floor is None else self.floor[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], floor=floor)

    def columns(self, first: int, end: int) -> Codes:
        """These columns, of whole groups."""
        groups = slice(first // GROUP, -(-end // GROUP))
        floor = None if self.floor is None else self.floor[:, groups]
        codes = self.codes[:, groups.start * GROUP : groups.stop * GROUP]
        return replace(self, codes=codes, scale=self.scale[:, groups], floor=floor, width=end - first)

    def to(self, device: torch.device) -> Codes:
        floor = None if self.floor is None else self.floor.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), floor=floor)

    def steps(self, groups: int | slice = slice(None)) -> Tensor:
        """code - centre of these groups, float32 [out, groups, GROUP]; of one group [out, GROUP]."""
        chosen: Tensor = self.codes.unflatten(1, (-1, GROUP))[:, groups]
        return chosen.float() - CENTRE[self.bits]

    def dequantised(self) -> Tensor:
        """The weights [out, in], float32."""
        weight = self.steps() * self.scale.float()[..., None]
        if self.floor is not None:
            weight += self.floor.float()[..., None]
        return weight.flatten(1)[:, : self.width]

    def raised(self) -> Codes:
        """The same weights, to the bit, as 8-bit codes."""
        if self.bits == 8:
            return self
        return replace(self, codes=self.codes + CENTRE[8], bits=8)


def stack(parts: Sequence[Codes]) -> Codes:
    """Stack matrices of one width: in 8 bits if they differ in bits, with a floor if one has it. Exact."""
    if len(parts) == 1:
        return parts[0]
    if len({part.bits for part in parts}) > 1:
        parts = [part.raised() for part in parts]
    floor = None
    if any(part.floor is not None for part in parts):
        floor = torch.cat([torch.zeros_like(part.scale) if part.floor is None else part.floor for part in parts])
    codes, scale = torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts])
    return Codes(codes, scale, floor, parts[0].bits, parts[0].width)


def check_precision(precision: str, name: str = "quantize") -> None:
    """Raise `InvalidOption` for an unknown one."""
    if precision not in get_args(Precision):
        raise InvalidOption(f"{name} must be auto, none, int8 or int4, got {precision!r}", "Choose one of these")


def quantize(weight: Tensor, bits: int) -> Codes:
    """The nearest codes of a matrix [out, in] of any float dtype.

    8 bits: the largest of a group is 127 steps, no floor. 4 bits: from about the least to about the largest of a group.
    Scale and floor are rounded to float16 before the codes are chosen.
    """
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    return stack([_quantize(piece, bits) for piece in weight.split(rows)])


def _quantize(weight: Tensor, bits: int) -> Codes:
    width = weight.shape[1]
    # The last column once more, so that the padding changes no group's range.
    filled = torch.cat([weight, weight[:, -1:].expand(-1, -width % GROUP)], 1).float()
    groups = filled.unflatten(1, (-1, GROUP))
    codes, scale, floor = _four_bits(groups) if bits == 4 else _eight_bits(groups)
    return Codes(codes.to(torch.uint8).flatten(1), scale[..., 0], None if floor is None else floor[..., 0], bits, width)


Fit = tuple[Tensor, Tensor, Tensor | None]
"""Codes as floats [out, groups, GROUP]; scale and floor, float16 [out, groups, 1]."""


def _eight_bits(groups: Tensor) -> Fit:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    return _nearest(groups, scale, -127, 127) + CENTRE[8], scale, None


_FITS = 4
"""Rounds of fitting. Four lower the squared error by 14 %, twice as much as a search of the range would."""


def _four_bits(groups: Tensor) -> Fit:
    """Codes from the least to the largest weight; then in turns the line that fits them, and the codes nearest it."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, floor = (high - low) / 15, low
    for _ in range(_FITS):
        scale, floor = _line(_nearest(groups - floor, scale, 0, 15), groups)
    scale, floor = scale.half(), floor.half()
    return _nearest(groups - floor, scale, 0, 15), scale, floor


def _nearest(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Whole steps of this scale within these bounds; 0 where the scale is 0."""
    step = scale.float()
    return (values / step.masked_fill(step == 0, torch.inf)).round_().clamp_(least, most)


def _line(codes: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and floor of least squared error for these codes."""
    middle, mean = codes.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    off = codes - middle
    scale = (off * groups).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True).clamp_(min=1e-9)
    return scale, mean - scale * middle


class Rounded(NamedTuple):
    """Activations in whole steps: `steps` float32 of -127 to 127 [..., groups, GROUP], `scale` float32 [..., groups].

    Both depend on that row alone: with a scale per tensor, one drafted row would change all the others.
    """

    steps: Tensor
    scale: Tensor

    def values(self, width: int) -> Tensor:
        """The rounded activations, float32 [..., width]."""
        return (self.steps * self.scale[..., None]).flatten(-2)[..., :width]


def round_activations(x: Tensor) -> Rounded:
    """Round rows [..., in] of any float dtype to 8 bits, each group by itself: its largest is 127 steps, ties to even.

    Groups of zeros stay zeros; non-finite values stay non-finite in `scale`.
    """
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    # The bound keeps the inverse finite. Anything smaller is negligible beside any weight that float16 scales reach.
    largest = groups.abs().amax(-1).clamp(min=1e-30)
    # As in the kernels: `127 / largest` would be 127 times a rounded inverse.
    inverse = torch.full_like(largest, 127).div_(largest)
    return Rounded((groups * inverse[..., None]).round_(), largest / 127)
