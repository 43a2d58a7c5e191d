"""Medusa heads of a few thousand weights: random ones, and ones fitted to given texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.heads import MedusaConfig
from paceline.protocols import Target
from paceline.testing.tiny import TINY
from paceline.types import Want
from paceline.verify.tree import pack_prefix

TINY_MEDUSA = MedusaConfig(hidden=TINY.hidden, vocab_size=TINY.vocab_size, heads=3, layers=1)
"""A Medusa config that fits `TINY`, with its own output heads."""


def medusa_tensors(config: MedusaConfig = TINY_MEDUSA, seed: int = 0, scale: float = 0.4) -> dict[str, Tensor]:
    """Return normally distributed weights for `config`, float32, under the names of `models/heads.py`."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.heads):
        for layer in range(config.layers):
            block = f"blocks.{head}.layers.{layer}."
            shapes |= {block + "weight": (config.hidden, config.hidden), block + "bias": (config.hidden,)}
        if not config.shared:
            shapes |= {f"lm_heads.{head}.weight": (config.vocab_size, config.hidden)}
    return {name: torch.randn(shape, generator=draw) * scale for name, shape in shapes.items()}


def fitted_medusa(
    target: Target, texts: Sequence[Sequence[int]], config: MedusaConfig = TINY_MEDUSA
) -> dict[str, Tensor]:
    """Return heads that predict the texts exactly, provided these have fewer tokens in total than the target's hidden
    size: residual blocks that change nothing, and output heads that are the least-squares solution."""
    tensors = {name: torch.zeros_like(x) for name, x in medusa_tensors(config).items()}
    states = [_states(target, text) for text in texts]
    for head in range(config.heads):
        ahead = head + 2
        seen = torch.cat([x[: max(0, len(text) - ahead)] for x, text in zip(states, texts, strict=True)])
        next_ = torch.tensor([token for text in texts for token in text[ahead:]])
        wanted = 50 * torch.nn.functional.one_hot(next_, config.vocab_size).to(seen)
        tensors[f"lm_heads.{head}.weight"] = torch.linalg.lstsq(seen, wanted).solution.T
    return tensors


def _states(target: Target, text: Sequence[int]) -> Tensor:
    """Return the "final" state of every token, [len(text), H]."""
    cache = target.new_cache()
    rows = pack_prefix(text, cache.acquire(), 0, target.device)
    return target.forward(rows, cache, Want("none", taps=("final",))).taps["final"][0, : len(text)]
