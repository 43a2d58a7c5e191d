"""Random hybrids with a few thousand weights.

They have Gated DeltaNet layers below and above gated attention, or Mamba-2 layers without attention, next to attention,
and below a layer with only an MLP.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.config import AttentionConfig, DeltaNetConfig, LayerConfig, Mamba2Config, NormConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.testing import TINY, random_tensors

DELTA = DeltaNetConfig(key_heads=2, heads=4, key_dim=8, value_dim=4, width=4)
_ROPE = RopeConfig(share=0.5)
_RECURRENT = LayerConfig(None, recurrent=DELTA, attends=False)
_LAYERS = (_RECURRENT, LayerConfig(_ROPE), _RECURRENT)
HYBRID = replace(
    TINY,
    family="qwen3_5_text",
    layers=3,
    context_length=1200,
    special=_LAYERS,
    rope=_ROPE,
    norms=NormConfig(heads="shared"),
    attention=AttentionConfig(gated=True),
)


def hybrid_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return normally distributed weights by Hugging Face name."""
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


MAMBA = Mamba2Config(key_heads=2, heads=4, key_dim=6, value_dim=8, width=4)
_KINDS = (
    LayerConfig(None, recurrent=MAMBA, attends=False, feeds=False),
    LayerConfig(_ROPE, recurrent=MAMBA),
    LayerConfig(None, attends=False),
)
MAMBA_HYBRID = replace(TINY, family="falcon_h1", layers=3, context_length=1200, special=_KINDS, rope=_ROPE)


def mamba_tensors(seed: int = 0) -> dict[str, Tensor]:
    """As `hybrid_tensors`."""
    draw, c, m = torch.Generator().manual_seed(seed), MAMBA_HYBRID, MAMBA
    values = m.heads * m.value_dim
    shapes: dict[str, tuple[int, ...]] = {
        **{"in_proj.weight": (values + m.channels + m.heads, c.hidden), "out_proj.weight": (c.hidden, values)},
        **{"conv1d.weight": (m.channels, 1, m.width), "conv1d.bias": (m.channels,), "norm.weight": (values,)},
        **dict.fromkeys(("A_log", "D", "dt_bias"), (m.heads,)),
    }
    without = ("0.self_attn", "0.mlp", "0.post_attention", "2.self_attn", "2.post_attention")
    tensors = random_tensors(c, seed, 0.3)
    tensors = {
        name: x for name, x in tensors.items() if not name.startswith(tuple(f"model.layers.{w}" for w in without))
    }
    for i in (0, 1):
        mixer = f"model.layers.{i}.mamba."
        tensors |= {mixer + name: torch.randn(shape, generator=draw) * 0.5 for name, shape in shapes.items()}
    return tensors


def tiny_mamba(seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a hybrid with Mamba-2."""
    return Decoder(MAMBA_HYBRID, mamba_tensors(seed), dtype, torch.device("cpu"))


def tiny_hybrid(seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a hybrid in float64, so that rounding does not matter."""
    return Decoder(HYBRID, hybrid_tensors(seed), dtype, torch.device("cpu"))


def text(count: int, seed: int = 1) -> list[int]:
    """Return random tokens for the hybrids."""
    return torch.randint(1, 37, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
