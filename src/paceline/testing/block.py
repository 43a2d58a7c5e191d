"""A random block drafter of a few thousand weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.heads import BlockConfig
from paceline.testing.tiny import TINY, random_tensors

TINY_BLOCK = BlockConfig(replace(TINY, qk_norm=True), taps=(0, 1), size=5, mask_token=36)
"""A block drafter's config that fits `TINY`."""


def block_tensors(config: BlockConfig = TINY_BLOCK, seed: int = 0) -> dict[str, Tensor]:
    """Return normally distributed weights for `config`, float32, under the names of `models/heads.py`; norms are near
    1."""
    c, draw = config.layer, torch.Generator().manual_seed(seed)
    names = [f"layers.{i}.{norm}_layernorm" for i in range(c.layers) for norm in ("input", "post_attention")]
    shapes = dict.fromkeys([*names, "hidden_norm", "norm"], c.hidden)
    if c.qk_norm:
        shapes |= {f"layers.{i}.self_attn.{x}_norm": c.head_dim for i in range(c.layers) for x in "qk"}
    layers = {
        name.removeprefix("model."): tensor
        for name, tensor in random_tensors(c, seed).items()
        if name.startswith("model.layers.")
    }
    fc = torch.randn(c.hidden, len(config.taps) * c.hidden, generator=draw) * 0.3
    norms = {name + ".weight": 1 + 0.2 * torch.randn(size, generator=draw) for name, size in shapes.items()}
    return layers | norms | {"fc.weight": fc}
