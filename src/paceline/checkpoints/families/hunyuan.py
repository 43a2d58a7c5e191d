"""Hunyuan (dense): Llama with QK-norm after the rotary embedding, and a larger rotary base."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, QK_NORMS, Family, GGUFLayout, Raw
from paceline.files.schema import FACTOR, check_value
from paceline.models.config import ModelConfig, NormConfig
from paceline.models.rope import scaling_of


def _rope(scaling: Raw) -> Raw:
    """Remove a rope scaling with an `alpha`. Its type is "dynamic", but it does not depend on the text's length."""
    return {"rope_theta": scaling.get("rope_theta")} if scaling.get("alpha") else scaling


def _hunyuan(raw: Raw, base: ModelConfig) -> ModelConfig:
    alpha = scaling_of(raw).get("alpha") or 1.0
    check_value("config.json", "rope scaling: alpha", alpha, FACTOR)
    theta = base.rope.theta * alpha ** (base.head_dim / max(1, base.head_dim - 2))
    norms = NormConfig(base.norms.eps, heads="shared", qk_norm_after_rope=True)
    return replace(base, rope=replace(base.rope, theta=theta), norms=norms)


FAMILIES = (
    Family(
        "hunyuan_v1_dense",
        "Hunyuan (dense)",
        {"rms_norm_eps": 1e-5},
        refine=_hunyuan,
        rope=_rope,
        names={".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."},
        gguf=(GGUFLayout("hunyuan-dense", {**LAYER, **QK_NORMS}),),
        goldens={
            "hunyuan": {"head_dim": 16, "attention_bias": True},
            "hunyuan, stretched": {
                "head_dim": 8,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
            },
        },
    ),
)
