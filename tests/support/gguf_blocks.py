"""Random matrices in GGUF's types."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from paceline.kernels.stored import Stored

HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}
"""Type -> offsets of the float16 scales in a block, which must not become infinite by random bytes."""


def number(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def random_blocks(kind: str, out: int, width: int, seed: int = 0) -> Tensor:
    """Return rows with random values and scales, uint8 [out, bytes]."""
    size, count = gguf.GGML_QUANT_SIZES[number(kind)]
    noise = np.random.default_rng(seed)
    blocks = noise.integers(0, 256, (out * width // size, count), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (noise.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = noise.integers(110, 128, len(blocks))
        blocks[:2, 0] = (0, 1)
    return torch.from_numpy(blocks).view(out, -1)


def stored(kind: str, out: int, width: int, seed: int = 0) -> tuple[Stored, Tensor]:
    """Return a matrix and its weights in float32."""
    data = random_blocks(kind, out, width, seed)
    return Stored.of(data, int(number(kind)), width), torch.from_numpy(gguf.dequantize(data.numpy(), number(kind)))
