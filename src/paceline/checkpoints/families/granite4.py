"""Granite 4: Granite with Mamba-2 states in most layers. Some models also have mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.families.granite import DEFAULTS, KEYS, granite, read_factors
from paceline.checkpoints.families.mamba2 import (
    BAMBA_DEFAULTS,
    BAMBA_KEYS,
    MAMBA_EXACT_NAMES,
    MAMBA_LAYER,
    TINY_STATE,
    bamba_state,
    read_state,
)
from paceline.checkpoints.family import Family, GGUFLayout, Raw, experts_named, shared_expert_named
from paceline.checkpoints.gguf_metadata import Config, Metadata, sizes_of_all_layers
from paceline.checkpoints.layer_plans import read_types
from paceline.files.schema import EXPERT_COUNT, EXPERTS, ROWS, integer
from paceline.models.config import LayerConfig, MixtureConfig, ModelConfig

ATTENTION, MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
"""The names that configs use for the two layer types."""


def _granite4(raw: Raw, base: ModelConfig) -> ModelConfig:
    types = read_types(raw["layer_types"], base, ATTENTION + MAMBA, lambda _: "mamba")
    rope = base.rope if raw["position_embedding_type"] == "rope" else None
    attends = [one in ATTENTION for one in types]
    count, experts = raw["num_local_experts"], None
    if count:
        experts = MixtureConfig(
            count,
            raw["num_experts_per_tok"],
            base.ffn,
            normalised=True,
            block="block_sparse_moe",
            router="router.layer",
            shared=raw["shared_intermediate_size"],
            shared_block="mlp",
        )
    base = replace(granite(raw, base), mixture=experts, ffn=raw["shared_intermediate_size"])
    attention = LayerConfig(rope, sparse=bool(count))
    if all(attends):
        return replace(base, special=(attention,) * base.layers)
    state = LayerConfig(None, sparse=bool(count), recurrent=bamba_state(raw, base), attends=False)
    return replace(base, special=tuple(attention if one else state for one in attends))


def _read(meta: Metadata, config: Config) -> Config:
    """Read the states and the scaling factors. Layers without key heads have no attention."""
    attends = sizes_of_all_layers(meta, config, "attention.head_count_kv")
    return {
        **read_state(meta),
        **read_factors(meta, config),
        "layer_types": ["attention" if one else "mamba" for one in attends],
        "num_local_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "shared_intermediate_size": meta.get("expert_shared_feed_forward_length") or config["intermediate_size"],
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else None,
    }


_TINY = {
    **TINY_STATE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "shared_intermediate_size": 56,
    "num_local_experts": 0,
}

FAMILIES = (
    Family(
        "granitemoehybrid",
        "Granite 4",
        {
            **BAMBA_DEFAULTS,
            **DEFAULTS,
            "layer_types": None,
            "position_embedding_type": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        },
        {
            **BAMBA_KEYS,
            **KEYS,
            "num_local_experts": integer(0, EXPERTS),
            "num_experts_per_tok": EXPERT_COUNT,
            "shared_intermediate_size": ROWS,
        },
        _granite4,
        names={
            ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
            ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.down_proj.",
        },
        gguf=(
            GGUFLayout(
                "granitehybrid",
                {**MAMBA_LAYER, "ffn_gate_inp": "block_sparse_moe.router.layer", **shared_expert_named("mlp")},
                experts_named("block_sparse_moe.experts"),
                MAMBA_EXACT_NAMES,
                interleaved=True,
                read=_read,
                uneven=True,
            ),
        ),
        goldens={
            "granite 4": _TINY,
            "granite 4, experts, positions": {
                **_TINY,
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "position_embedding_type": "rope",
            },
            "granite 4, attention alone": {
                **_TINY,
                "layer_types": ["full_attention"] * 4,
                "position_embedding_type": "rope",
            },
        },
    ),
)
