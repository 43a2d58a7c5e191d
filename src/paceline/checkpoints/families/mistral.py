"""Mistral, Ministral and Mixtral: Llama with windows or experts. GGUF files call them llama."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import MIXTURE_KEYS, Family, Raw
from paceline.checkpoints.layer_plans import windows_by_type, windows_everywhere, with_layers
from paceline.models.config import MixtureConfig, ModelConfig


def _mixtral(raw: Raw, base: ModelConfig) -> ModelConfig:
    used, names = raw["num_experts_per_tok"], ("w1", "w3", "w2")
    experts = MixtureConfig(
        raw["num_local_experts"], used, base.ffn, normalised=True, block="block_sparse_moe", names=names
    )
    windows = [raw.get("sliding_window")] * base.layers
    return with_layers(replace(base, mixture=experts), windows, sparse=[True] * base.layers)


FAMILIES = (
    Family(
        "mistral",
        "Mistral",
        {"sliding_window": 4096},
        refine=windows_everywhere,
        goldens={"mistral, sliding": {"sliding_window": 24}, "mistral": {"sliding_window": None}},
    ),
    Family(
        "ministral",
        "Ministral",
        {"sliding_window": None, "layer_types": None},
        refine=windows_by_type,
        goldens={
            "ministral, sliding": {
                "head_dim": 8,
                "sliding_window": 19,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    Family(
        "mixtral",
        "Mixtral",
        {
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
        },
        MIXTURE_KEYS,
        _mixtral,
        goldens={"mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19}},
    ),
)
