"""Nemotron-H: each layer has either a Mamba-2 state, attention without positions, a feed-forward block, or a mixture of
experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from paceline.checkpoints.families.deepseek import BIAS
from paceline.checkpoints.families.granite4 import ATTENTION, MAMBA
from paceline.checkpoints.families.mamba2 import MAMBA_EXACT_NAMES, MAMBA_LAYER, MIXER_NAMES, read_state, state_of
from paceline.checkpoints.family import Family, GGUFLayout, Raw, experts_named, shared_expert_named
from paceline.checkpoints.gguf_metadata import Config, Metadata, sizes_of_all_layers
from paceline.checkpoints.layer_plans import read_types
from paceline.errors import UnsupportedModel
from paceline.files.schema import (
    EPS,
    EXPERT_COUNT,
    EXPERTS,
    FACTOR,
    FLAG,
    HEAD_COUNT,
    MAX_ROWS,
    NULL,
    ROWS,
    TEXT,
    each,
    integer,
    list_of,
)
from paceline.models.config import LayerConfig, MixtureConfig, ModelConfig, NormConfig

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(raw: Raw, base: ModelConfig) -> ModelConfig:
    key = "layers_block_type" if raw["layers_block_type"] else "hybrid_override_pattern"
    given = raw["layers_block_type"] or [_PATTERN.get(x, x) for x in raw["hybrid_override_pattern"] or ""]
    types = read_types(given, base, (*ATTENTION, *MAMBA, "mlp", "moe"), key=key)
    if raw["mlp_hidden_act"] != "relu2" or raw["moe_latent_size"] or raw["n_group"] != 1:
        raise UnsupportedModel(
            "a nemotron_h model with latent or grouped experts, or an activation other than relu2, is not supported",
            "Use another model of the family",
        )
    state = state_of(
        raw,
        raw["mamba_hidden_act"],
        groups=raw["n_groups"],
        heads=raw["mamba_num_heads"],
        keys=raw["ssm_state_size"],
        values=raw["mamba_head_dim"],
        width=raw["conv_kernel"],
    )
    layers = []
    for kind in types:
        attends, feeds, recurrent = kind in ATTENTION, kind in ("mlp", "moe"), state if kind in MAMBA else None
        layers.append(LayerConfig(None, sparse=kind == "moe", recurrent=recurrent, attends=attends, feeds=feeds))
    norms, experts = NormConfig(raw["layer_norm_epsilon"]), _experts(raw) if "moe" in types else None
    return replace(
        base, special=tuple(layers), norms=norms, mixture=experts, activation=raw["mlp_hidden_act"], gated_mlp=False
    )


def _experts(raw: Raw) -> MixtureConfig:
    return MixtureConfig(
        raw["n_routed_experts"],
        raw["num_experts_per_tok"],
        raw["moe_intermediate_size"],
        normalised=raw["norm_topk_prob"],
        shared=raw["n_shared_experts"] * raw["moe_shared_expert_intermediate_size"],
        shared_block="mlp.shared_experts",
        sigmoid=True,
        scale=raw["routed_scaling_factor"],
    )


def _read(meta: Metadata, config: Config, feeds: str = "mlp") -> Config:
    """Read the type of each layer. An attention layer has key heads, and a feed-forward layer has a width. All other
    layers have states."""
    pairs = (sizes_of_all_layers(meta, config, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    sizes = read_state(meta, "")
    return {
        "mamba_num_heads": sizes["n_heads"],
        "mamba_head_dim": sizes["d_head"],
        "n_groups": sizes["n_groups"],
        "ssm_state_size": sizes["d_state"],
        "conv_kernel": sizes["d_conv"],
        "layers_block_type": [
            "attention" if kv else feeds if width else "mamba" for kv, width in zip(*pairs, strict=True)
        ],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "n_routed_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
        "n_group": meta.get("expert_group_count", 0) or 1,
        "moe_latent_size": meta.get("moe_latent_size") or None,
    }


_GGUF = GGUFLayout(
    "nemotron_h",
    {**MAMBA_LAYER, "ffn_gate_inp": "mlp.gate", **shared_expert_named("mlp.shared_experts")},
    experts_named("mlp.experts"),
    {**MAMBA_EXACT_NAMES, **BIAS},
    interleaved=True,
    read=_read,
    keys={"moe_latent_size": integer(0, MAX_ROWS)},
    uneven=True,
)
_TINY = {
    "num_attention_heads": 4,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}

FAMILIES = (
    Family(
        "nemotron_h",
        "Nemotron-H, Nemotron 2 and 3 Nano",
        {
            "n_groups": 8,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "layer_norm_epsilon": 1e-5,
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "moe_latent_size": None,
            "n_group": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 7688,
            "head_dim": 128,
        },
        {
            **each(HEAD_COUNT, "n_groups", "mamba_num_heads"),
            **each(integer(1, 4096), "head_dim", "ssm_state_size", "mamba_head_dim"),
            "conv_kernel": integer(1, 64),
            "layer_norm_epsilon": EPS,
            "layers_block_type": list_of(TEXT) | NULL,
            "hybrid_override_pattern": TEXT | NULL,
            "n_routed_experts": integer(0, EXPERTS),
            **each(EXPERT_COUNT, "num_experts_per_tok", "n_shared_experts", "n_group"),
            **each(ROWS, "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
            "moe_latent_size": ROWS | NULL,
            "norm_topk_prob": FLAG,
            "routed_scaling_factor": FACTOR,
        },
        _nemotron_h,
        names=MIXER_NAMES,
        gguf=(_GGUF, replace(_GGUF, architecture="nemotron_h_moe", read=partial(_read, feeds="moe"))),
        goldens={
            "nemotron-h": {
                **_TINY,
                "num_hidden_layers": 5,
                "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"],
            },
            "nemotron-h, experts": {
                **_TINY,
                "num_hidden_layers": 5,
                "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
            },
        },
    ),
)
