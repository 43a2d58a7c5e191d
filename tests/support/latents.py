"""Random weights of models with latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.testing import random_tensors


def latent_tensors(config: ModelConfig, seed: int, scale: float | None = None) -> dict[str, Tensor]:
    """Return random weights for a model with latent attention. `scale`: Standard deviation of its projections. None for
    one over the square root of their width."""
    c, draw = config.attention.latent, torch.Generator().manual_seed(seed)
    assert c
    tensors = {name: x for name, x in random_tensors(config, seed).items() if "self_attn" not in name}
    queries = config.heads * (c.plain + c.rotary)
    shapes = {"q_proj": (queries, config.hidden)}
    if c.query_rank:
        shapes = {"q_a_proj": (c.query_rank, config.hidden), "q_b_proj": (queries, c.query_rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (c.rank + c.rotary, config.hidden),
        "kv_b_proj": (config.heads * (c.plain + c.value), c.rank),
        "o_proj": (config.hidden, config.heads * c.value),
    }
    for i in range(config.layers):
        attention = f"model.layers.{i}.self_attn."
        for name, shape in shapes.items():
            tensors[f"{attention}{name}.weight"] = torch.randn(shape, generator=draw) * (scale or shape[1] ** -0.5)
        tensors[f"{attention}kv_a_layernorm.weight"] = torch.ones(c.rank)
        if c.query_rank:
            tensors[f"{attention}q_a_layernorm.weight"] = torch.ones(c.query_rank)
    return tensors
