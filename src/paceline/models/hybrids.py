"""The families with recurrent layers, and those whose language model is a part of a larger one; see `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.config import DeltaNetConfig, Experts, LayerConfig, ModelConfig, ShortConvConfig
from paceline.models.layer_types import FULL, read_types

Raw = Mapping[str, Any]

NEXT: dict[str, Any] = {
    "head_dim": 256,
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_heads_tiled": False,
}
NEXT_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def qwen3_next(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet, and every few layers attention with a gate."""
    recurrent = DeltaNetConfig(
        raw["linear_num_key_heads"],
        raw["linear_num_value_heads"],
        raw["linear_key_head_dim"],
        raw["linear_value_head_dim"],
        raw["linear_conv_kernel_dim"],
        raw["linear_heads_tiled"],
    )
    every = raw["full_attention_interval"]
    types = read_types(raw.get("layer_types"), base, (FULL, _LINEAR), lambda i: _LINEAR if (i + 1) % every else FULL)
    experts, sparse = None, [False] * base.layers
    if base.family in ("qwen3_next", "qwen3_5_moe_text"):
        experts = Experts(
            raw["num_experts"],
            raw["num_experts_per_tok"],
            raw["moe_intermediate_size"],
            raw["norm_topk_prob"],
            shared=raw["shared_expert_intermediate_size"],
        )
        dense = raw.get("mlp_only_layers") or ()
        sparse = [i not in dense and (i + 1) % raw["decoder_sparse_step"] == 0 for i in range(base.layers)]
    layers = [
        LayerConfig(None, sparse=one, recurrent=recurrent, attends=False)
        if kind == _LINEAR
        else LayerConfig(base.rope, sparse=one)
        for kind, one in zip(types, sparse, strict=True)
    ]
    return replace(base, special=tuple(layers), experts=experts, qk_norm=True, gated=True, norm_shift=1.0)


_LINEAR = "linear_attention"


LFM2: dict[str, Any] = {
    "layer_types": None,
    "full_attn_idxs": None,
    "intermediate_size": 12288,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


LFM2_EXPERTS: dict[str, Any] = {
    **{"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
    **{"routed_scaling_factor": 1.0, "norm_topk_prob": True, "intermediate_size": 7168},
    "block_auto_adjust_ff_dim": False,
}


def lfm2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """LFM2: short convolutions, and attention in some layers. LFM2-MoE: experts too, but in the first layers."""
    attends = raw.get("full_attn_idxs")
    types = read_types(
        raw.get("layer_types"),
        base,
        (FULL, _CONV),
        lambda i: FULL if attends is None or i in attends else _CONV,
    )
    recurrent = ShortConvConfig(base.hidden, raw["conv_L_cache"])
    experts, dense = None, base.layers
    if base.family == "lfm2_moe":
        dense, width, used = raw["num_dense_layers"], raw["moe_intermediate_size"], raw["num_experts_per_tok"]
        experts = Experts(
            raw["num_experts"], used, width, raw["norm_topk_prob"], names=("w1", "w3", "w2"), sigmoid=True
        )
        experts = replace(experts, scale=raw["routed_scaling_factor"])
    layers = [
        LayerConfig(None, sparse=i >= dense, recurrent=recurrent, attends=False)
        if kind == _CONV
        else LayerConfig(base.rope, sparse=i >= dense)
        for i, kind in enumerate(types)
    ]
    ffn = raw.get("block_ff_dim") or base.ffn
    if raw["block_auto_adjust_ff_dim"]:
        ffn, multiple = int(2 * ffn / 3), raw["block_multiple_of"]
        if raw["block_ffn_dim_multiplier"] is not None:
            ffn = -(-int(raw["block_ffn_dim_multiplier"] * ffn) // multiple) * multiple
    return replace(base, special=tuple(layers), ffn=ffn, norm_eps=raw["norm_eps"], qk_norm=True, experts=experts)


_CONV = "conv"

TEXT_PARTS = {
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models that also see -> their language model, which runs by itself here."""


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model of one of `TEXT_PARTS`; any other as it is."""
    inner = raw.get("text_config")
    if raw.get("model_type") not in TEXT_PARTS or not isinstance(inner, dict):
        return raw
    shared = {key: raw[key] for key in ("architectures", "tie_word_embeddings", "eos_token_id") if key in raw}
    return {**shared, **inner, "model_type": TEXT_PARTS[raw["model_type"]]}
