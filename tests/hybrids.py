"""A random hybrid of a few thousand weights: Gated DeltaNet below and above gated attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.config import DeltaNetConfig, LayerConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.testing import TINY, random_tensors

DELTA = DeltaNetConfig(key_heads=2, heads=4, key_dim=8, value_dim=4, width=4)
_ROPE = RopeConfig(share=0.5)
_RECURRENT = LayerConfig(None, recurrent=DELTA, attends=False)
_LAYERS = (_RECURRENT, LayerConfig(_ROPE), _RECURRENT)
HYBRID = replace(
    TINY, family="qwen3_5_text", layers=3, context_length=1200, special=_LAYERS, rope=_ROPE, qk_norm=True, gated=True
)


def hybrid_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Normally distributed weights by Hugging Face name."""
    draw, c, d = torch.Generator().manual_seed(seed), HYBRID, DELTA
    tensors, values = random_tensors(c, seed, 0.3), d.heads * d.value_dim
    for i, layer in enumerate(c.plan):
        linear, attn = f"model.layers.{i}.linear_attn.", f"model.layers.{i}.self_attn."
        if layer.recurrent:
            tensors = {name: x for name, x in tensors.items() if not name.startswith(attn)}
            shapes: dict[str, tuple[int, ...]] = {
                "in_proj_qkv.weight": (d.channels, c.hidden),
                "in_proj_z.weight": (values, c.hidden),
                "in_proj_b.weight": (d.heads, c.hidden),
                "in_proj_a.weight": (d.heads, c.hidden),
                "conv1d.weight": (d.channels, 1, d.width),
                "out_proj.weight": (c.hidden, values),
                "A_log": (d.heads,),
                "dt_bias": (d.heads,),
                "norm.weight": (d.value_dim,),
            }
        else:
            linear, q = attn, 2 * c.heads * c.head_dim
            shapes = {"q_proj.weight": (q, c.hidden), "q_norm.weight": (c.head_dim,), "k_norm.weight": (c.head_dim,)}
        tensors |= {linear + name: torch.randn(shape, generator=draw) * 0.5 for name, shape in shapes.items()}
    return tensors


def tiny_hybrid(seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """A hybrid in float64, so that rounding does not matter."""
    return Decoder(HYBRID, hybrid_tensors(seed), dtype, torch.device("cpu"))
