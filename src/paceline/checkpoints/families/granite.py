"""Granite 3: Llama with scaling factors for the embedding, the attention scores, the outputs of layers, and the
logits."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.files.schema import FACTOR
from paceline.models.config import AttentionConfig, ModelConfig

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
DEFAULTS = dict.fromkeys(_FACTORS, 1.0)
KEYS = dict.fromkeys(_FACTORS, FACTOR)


def granite(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add the scaling factors."""
    return replace(
        base,
        embed_scale=raw["embedding_multiplier"],
        attention=AttentionConfig(scale=raw["attention_multiplier"]),
        residual_scale=raw["residual_multiplier"],
        logits_divisor=raw["logits_scaling"],
    )


def read_factors(meta: Metadata, config: Config) -> Config:
    """Return the scaling factors in a GGUF file."""
    keys = {"embedding_multiplier": "embedding", "residual_multiplier": "residual", "logits_scaling": "logit"}
    factors = {name: meta.get(f"{key}_scale", 1.0) for name, key in keys.items()}
    return {"attention_multiplier": meta["attention.scale"], **factors}


FAMILIES = (
    Family(
        "granite",
        "Granite 3",
        DEFAULTS,
        KEYS,
        granite,
        gguf=(GGUFLayout("granite", interleaved=True, read=read_factors),),
        goldens={
            "granite": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.4,
                "logits_scaling": 2.5,
                "attention_bias": True,
            }
        },
    ),
)
