"""gpt-oss's tensors in the form that other mixtures of experts have: one tensor per expert instead of a stack of all
experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import CorruptModel
from paceline.files.schema import EXPERTS
from paceline.kernels.stored import FLOATS, Stored
from paceline.models.lazy import LazyTensors, shape_of, stored_of

_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Name of a stack -> the projections that it contains, each with its rows in the stack."""

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MXFP4, _GROUP = 39, 32
"""The type's number in ggml, and the number of weights that share an exponent."""


class _StackPart(NamedTuple):
    """The location of one expert's tensor: `rows` of entry `expert` in the stack `name`."""

    name: str
    expert: int
    rows: slice


class ExpertTensors(LazyTensors):
    """Tensors with the names `PREFIX.experts.E.{gate,up,down}_proj.{weight,bias}`, read from stacks of all experts.

    A stack has one of these forms:

    - [E, in, out] of floats, without a suffix;
    - [E, out, groups, 16] of MXFP4 codes (`_blocks`), two per byte with the first in the low bits, and [E, out, groups]
      of their exponents (`_scales`);
    - [E, out] of biases (`_bias`).

    Rows of gate and up alternate in their common stack. Sinks are renamed to `sinks.weight`, as in GGUF. OpenAI's
    checkpoints and transformers' `integrations/mxfp4.py` use this layout.

    Raises:
        CorruptModel: If a stack has another shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._parts: dict[str, _StackPart | str] = {}
        self._names = self._parts
        for name in tensors:
            if found := _STACK.fullmatch(name):
                self._unstack(name, *found.groups())
            else:
                self._parts[name + ".weight" if name.endswith(".sinks") else name] = name

    def _unstack(self, name: str, block: str, stack: str, suffix: str) -> None:
        shape = shape_of(self._tensors, name)
        self._check(name, shape, suffix)
        for part, rows in _ROWS[stack].items():
            for expert in range(shape[0] if suffix != "_scales" else 0):
                kind = "bias" if suffix == "_bias" else "weight"
                self._parts[f"{block}.{expert}.{part}.{kind}"] = _StackPart(name, expert, rows)

    def _check(self, name: str, shape: tuple[int, ...], suffix: str) -> None:
        fits = len(shape) == {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}[suffix] and 0 < shape[0] <= EXPERTS
        if suffix == "_scales":
            blocks = name.removesuffix(suffix) + "_blocks"
            whole = (*shape, _GROUP // 2)
            fits = fits and blocks in self._tensors and shape_of(self._tensors, blocks) == whole
        if suffix == "_blocks":
            fits = fits and name.removesuffix(suffix) + "_scales" in self._tensors
        if not fits:
            raise CorruptModel(f"{name} has shape {shape}, which is no stack of experts", "Fetch the model again")

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if isinstance(part, str):
            return self._tensors[part]
        stack = self._tensors[part.name][part.expert]
        if part.name.endswith("_blocks"):
            blocks, exponents = self._blocks(part)
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
            values = torch.cat([_VALUES, -_VALUES])[codes.long()]
            return torch.ldexp(values, exponents[..., None].int() - 127).flatten(1)
        return stack[part.rows] if stack.ndim == 1 else stack.T[part.rows]

    def stored(self, name: str) -> Stored | None:
        part = self._parts[name]
        if isinstance(part, str):
            return stored_of(self._tensors, part)
        if part.name.endswith("_blocks"):
            blocks, exponents = self._blocks(part)
            # In ggml, the low bits of a byte hold a code from the first half of the group, and its high bits hold a
            # code from the second half.
            first, second = blocks[..., :8], blocks[..., 8:]
            paired = torch.stack([first & 15 | second << 4, first >> 4 | second & 240], -1).flatten(-2)
            data = torch.cat([exponents[..., None], paired], -1).flatten(1)
            return Stored.of(data, _MXFP4, exponents.shape[1] * _GROUP)
        tensor = self[name]
        return Stored.floats(tensor, None) if tensor.ndim == 2 and tensor.dtype in FLOATS else None

    def _blocks(self, part: _StackPart) -> tuple[Tensor, Tensor]:
        """Return the codes, two per byte [out, groups, 16], and the exponents [out, groups]."""
        names = part.name, part.name.removesuffix("blocks") + "scales"
        blocks, exponents = (self._tensors[name][part.expert][part.rows] for name in names)
        if not blocks.dtype == exponents.dtype == torch.uint8:
            raise CorruptModel(f"{part.name} and its scales must be bytes, got {blocks.dtype}", "Fetch the model again")
        return blocks, exponents

    def kind(self, name: str) -> str:
        part = self._parts[name]
        return "MXFP4" if isinstance(part, _StackPart) and part.name.endswith("_blocks") else super().kind(name)

    def mostly_codes(self) -> bool:
        return any(name.endswith("_blocks") for name in self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        if isinstance(part, str):
            return shape_of(self._tensors, part)
        _, *shape = shape_of(self._tensors, part.name)
        out, *width = [shape[0], shape[1] * _GROUP] if len(shape) == 3 else shape[::-1]
        return (len(range(out)[part.rows]), *width)
