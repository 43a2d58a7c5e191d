"""Seed-OSS: Llama with a head size that does not follow from the hidden size."""

from __future__ import annotations

from paceline.checkpoints.family import LAYER, Family, GGUFLayout

FAMILIES = (
    Family(
        "seed_oss",
        "Seed-OSS",
        {"head_dim": 128},
        gguf=(GGUFLayout("seed_oss", {**LAYER, "post_attention_norm": "post_attention_layernorm"}),),
        goldens={"seed-oss": {"head_dim": 16, "attention_bias": True}},
    ),
)
