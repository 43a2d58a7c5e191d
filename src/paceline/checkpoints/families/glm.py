"""GLM-4 of 2024 and of 2025, and GLM-4.5 to 4.7. GLM-4.5 to 4.7 have DeepSeek-V3's experts in all layers except the
first ones."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.families.deepseek import BIAS, GROUPED_KEYS, SCORE_BIAS, read_experts, read_gguf_experts
from paceline.checkpoints.family import (
    LAYER,
    POST_NORMS,
    QK_NORMS,
    Family,
    GGUFLayout,
    Raw,
    experts_named,
    shared_expert_named,
)
from paceline.checkpoints.gguf_metadata import Config, Metadata, rotated_share
from paceline.files.schema import FLAG
from paceline.models.config import LayerConfig, ModelConfig


def _glm4(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add norms after attention and after the feed-forward block."""
    return replace(base, norms=replace(base.norms, after=True))


def _glm4_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    experts = read_experts(raw) if raw["n_routed_experts"] else None
    dense = raw["first_k_dense_replace"] or 0
    layers = [LayerConfig(base.rope, sparse=experts is not None and i >= dense) for i in range(base.layers)]
    norms = replace(base.norms, heads="shared" if raw["use_qk_norm"] else None)
    return replace(base, special=tuple(layers), mixture=experts, norms=norms)


def _read_moe(meta: Metadata, config: Config) -> Config:
    # Look at all layers, not at the first one, because a file may contain only the MTP layer.
    normed = any(name.endswith(".attn_q_norm.weight") for name in meta.file.tensors)
    own = {"use_qk_norm": normed, "first_k_dense_replace": meta.get("leading_dense_block_count", 0)}
    return {**read_gguf_experts(meta), **rotated_share(meta, config), **own}


_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_TINY = {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

FAMILIES = (
    Family(
        "glm",
        "GLM-4 (2024)",
        _DEFAULTS,
        interleaved=True,
        goldens={"glm": {"head_dim": 16, "partial_rotary_factor": 0.5}},
    ),
    Family(
        "glm4",
        "GLM-4",
        _DEFAULTS,
        refine=_glm4,
        interleaved=True,
        names={
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".post_self_attn_layernorm.": ".post_attention_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        },
        gguf=(GGUFLayout("glm4", {**LAYER, **POST_NORMS, "ffn_up": "mlp.gate_up_proj"}, read=rotated_share),),
        goldens={"glm4": {"head_dim": 16, "partial_rotary_factor": 0.5}},
    ),
    Family(
        "glm4_moe",
        "GLM-4.5 to 4.7",
        {
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        {**GROUPED_KEYS, "use_qk_norm": FLAG},
        _glm4_moe,
        names=SCORE_BIAS,
        mtp_follows=True,
        gguf=(
            GGUFLayout(
                "glm4moe",
                {
                    **LAYER,
                    **QK_NORMS,
                    "post_attention_norm": "post_attention_layernorm",
                    "ffn_gate_inp": "mlp.gate",
                    **shared_expert_named("mlp.shared_experts"),
                },
                experts_named("mlp.experts"),
                BIAS,
                read=_read_moe,
            ),
        ),
        goldens={
            "glm4.5": {
                **_TINY,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.7,
                "use_qk_norm": True,
                "attention_bias": True,
            },
            "glm4.5 without groups": {
                **_TINY,
                "n_shared_experts": 2,
                "first_k_dense_replace": 2,
                "norm_topk_prob": False,
            },
        },
    ),
)
