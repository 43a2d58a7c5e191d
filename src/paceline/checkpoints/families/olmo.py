"""OLMo 2 and 3, and OLMoE.

QK-norm is applied across heads. In OLMo 2 and 3, norms come after attention and after the feed-forward block.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.families.gemma import rope_of_full_layers
from paceline.checkpoints.family import (
    LAYER,
    MIXTURE_KEYS,
    POST_NORMS,
    QK_NORMS,
    Family,
    GGUFLayout,
    Raw,
    experts_named,
)
from paceline.checkpoints.gguf_metadata import Config, Metadata, layer_types
from paceline.checkpoints.layer_plans import SLIDING, windows_except_every, with_layers
from paceline.models.config import MixtureConfig, ModelConfig, NormConfig
from paceline.models.rope import read_rope


def _olmo2(raw: Raw, base: ModelConfig) -> ModelConfig:
    return replace(base, norms=NormConfig(base.norms.eps, before=False, after=True, heads="joint"))


def _olmo3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add sliding windows to three layers out of four. Rope scaling does not apply to these layers."""
    own = (raw.get("rope_parameters") or {}).get(SLIDING)
    local = read_rope(own, raw, raw.get("rope_theta", base.rope.theta), base.head_dim)
    return _olmo2(raw, windows_except_every(raw, base, 4, local, base.rope))


def _olmoe(raw: Raw, base: ModelConfig) -> ModelConfig:
    used, normalised = raw["num_experts_per_tok"], raw["norm_topk_prob"]
    experts = MixtureConfig(raw["num_experts"], used, base.ffn, normalised=normalised)
    base = replace(base, norms=NormConfig(base.norms.eps, heads="joint"), mixture=experts)
    return with_layers(base, [None] * base.layers, sparse=[True] * base.layers)


def _read_experts(meta: Metadata, config: Config) -> Config:
    return {"num_experts": meta["expert_count"], "num_experts_per_tok": meta["expert_used_count"]}


def _read(meta: Metadata, config: Config) -> Config:
    """Distinguish OLMo 3 from OLMo 2, which has no sliding windows."""
    if not config["sliding_window"]:
        return {}
    return {"model_type": "olmo3", "layer_types": layer_types(meta, config["num_hidden_layers"], 4)}


_OLMOE = GGUFLayout(
    "olmoe",
    {**LAYER, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
    experts_named("mlp.experts"),
    read=_read_experts,
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 5e5}

FAMILIES = (
    Family(
        "olmo2",
        "OLMo 2",
        {"rms_norm_eps": 1e-5},
        refine=_olmo2,
        gguf=(GGUFLayout("olmo2", {**LAYER, **POST_NORMS, **QK_NORMS}, read=_read),),
        goldens={"olmo2": {"attention_bias": True}},
    ),
    Family(
        "olmoe",
        "OLMoE",
        {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        MIXTURE_KEYS,
        _olmoe,
        gguf=(_OLMOE,),
        goldens={"olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}},
    ),
    Family(
        "olmo3",
        "OLMo 3",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None},
        refine=_olmo3,
        rope=rope_of_full_layers,
        goldens={
            "olmo3, sliding": {"sliding_window": 18},
            "olmo3, sliding, stretched": {
                "sliding_window": 18,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "full_attention": _YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                },
            },
        },
    ),
)
