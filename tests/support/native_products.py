"""Matrix products of the CPU kernels, with every kind of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.cpu.matrix import NativeLinear
from paceline.kernels.quantize import Codes, quantize


def with_offsets(weight: Tensor) -> Codes:
    codes = quantize(weight, 8)
    noise = torch.randn(codes.scale.shape, generator=torch.Generator().manual_seed(9))
    return replace(codes, offset=(noise * 0.05).half())


KINDS: dict[str, Callable[[Tensor], Tensor | Codes]] = {
    "bfloat16": lambda w: w.bfloat16(),
    "float16": lambda w: w.half(),
    "float32": lambda w: w,
    "4 bits": lambda w: quantize(w, 4),
    "8 bits": lambda w: quantize(w, 8),
    "8 bits with offsets": with_offsets,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(kind: str, out: int, width: int, bias: bool = True) -> tuple[NativeLinear, Tensor | Codes, Tensor | None]:
    weight = KINDS[kind](random(out, width) / width**0.5)
    b = random(out, seed=1).bfloat16() if bias else None
    return NativeLinear(weight, b), weight, b
