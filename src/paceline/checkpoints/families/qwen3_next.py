"""Qwen3-Next and Qwen3.5: Gated DeltaNet in most layers, and gated attention in one layer of every few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.checkpoints.families.qwen import LANGUAGE, read_axes, text_axes, with_axes
from paceline.checkpoints.family import (
    LAYER,
    MIXTURE_KEYS,
    QK_NORMS,
    Family,
    GGUFLayout,
    Raw,
    experts_named,
    shared_expert_named,
)
from paceline.checkpoints.gguf_metadata import Config, Metadata, rotated_share
from paceline.checkpoints.layer_plans import FULL, read_types, sparse_layers
from paceline.files.schema import FLAG, HEAD_COUNT, ROWS, FieldKind, each, integer, list_of
from paceline.models.config import AttentionConfig, DeltaNetConfig, LayerConfig, MixtureConfig, ModelConfig, NormConfig

_LINEAR = "linear_attention"


def _dense(raw: Raw, base: ModelConfig) -> ModelConfig:
    base = with_axes(raw, base)
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
    state = LayerConfig(None, recurrent=recurrent, attends=False)
    norms = NormConfig(base.norms.eps, offset=1.0, heads="shared")
    layers = tuple(state if kind == _LINEAR else LayerConfig(base.rope) for kind in types)
    return replace(base, special=layers, attention=AttentionConfig(gated=True), norms=norms)


def _mixture(raw: Raw, base: ModelConfig) -> ModelConfig:
    base = _dense(raw, base)
    experts = MixtureConfig(
        raw["num_experts"],
        raw["num_experts_per_tok"],
        raw["moe_intermediate_size"],
        normalised=raw["norm_topk_prob"],
        shared=raw["shared_expert_intermediate_size"],
    )
    layers = zip(base.special, sparse_layers(raw, base), strict=True)
    return replace(base, special=tuple(replace(layer, sparse=one) for layer, one in layers), mixture=experts)


def _unlike_file(raw: Raw, module: str) -> str | None:
    tiled = raw.get("linear_heads_tiled") and ".linear_attn." in module
    return "the file has its heads in another order" if tiled else None


def _read(meta: Metadata, config: Config) -> Config:
    layers, heads = config["num_hidden_layers"], meta["ssm.time_step_rank"]
    listed_layers = meta.get("attention.recurrent_layers")
    every = meta.get("full_attention_interval", 4)
    recurrent = listed_layers[:layers] if listed_layers else [(i + 1) % every != 0 for i in range(layers)]
    experts = {
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
    }
    return {
        "layer_types": [_LINEAR if one else FULL for one in recurrent],
        **rotated_share(meta, config),
        "linear_num_key_heads": meta["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta["ssm.state_size"],
        "linear_value_head_dim": meta["ssm.inner_size"] // heads,
        "linear_conv_kernel_dim": meta["ssm.conv_kernel"],
        **(experts if experts["num_experts"] else {}),
    }


def _read_tiled(meta: Metadata, config: Config) -> Config:
    """Read Qwen3.5. Its files store heads in another order (`MatrixConfig.tiled`)."""
    return {**_read(meta, config), **read_axes(meta, config), "linear_heads_tiled": True}


_NEXT = GGUFLayout(
    "qwen3next",
    {
        **LAYER,
        **QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        **{f"ssm_{x}": f"linear_attn.in_proj_{y}" for x, y in (("ba", "ba"), ("beta", "b"), ("alpha", "a"))},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **shared_expert_named("mlp.shared_expert"),
    },
    experts_named("mlp.experts"),
    {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    norms_include_one=True,
    read=_read,
    keys={"full_attention_interval": integer(1), "attention.recurrent_layers": list_of(FLAG | integer())},
)
_DEFAULTS: dict[str, Any] = {
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
_EXPERTS: dict[str, Any] = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
_KEYS: dict[str, FieldKind] = {
    "full_attention_interval": integer(1),
    **each(HEAD_COUNT, "linear_num_key_heads", "linear_num_value_heads"),
    **each(integer(1, 4096), "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim": integer(1, 64),
    "linear_heads_tiled": FLAG,
}
_MIXTURE = {**_KEYS, **MIXTURE_KEYS, "shared_expert_intermediate_size": ROWS}
_TINY: dict[str, Any] = {
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_TINY_MIXTURE: dict[str, Any] = {
    **_TINY,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
_TYPES = [_LINEAR, FULL, _LINEAR, _LINEAR]

FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3-Next",
        {**_DEFAULTS, **_EXPERTS},
        _MIXTURE,
        _mixture,
        unlike_file=_unlike_file,
        gguf=(_NEXT,),
        goldens={
            "qwen3 next": {**_TINY_MIXTURE, "layer_types": _TYPES, "decoder_sparse_step": 2},
            "qwen3 next, experts of unscaled weights": {**_TINY_MIXTURE, "norm_topk_prob": False},
        },
    ),
    Family(
        "qwen3_5_text",
        "Qwen3.5",
        _DEFAULTS,
        _KEYS,
        _dense,
        text_axes,
        names=LANGUAGE,
        unlike_file=_unlike_file,
        part_of=("qwen3_5",),
        gguf=(replace(_NEXT, architecture="qwen35", read=_read_tiled),),
        goldens={
            "qwen3.5": _TINY,
            "qwen3.5, as many key heads": {**_TINY, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
        },
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5, experts",
        {**_DEFAULTS, **_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1},
        _MIXTURE,
        _mixture,
        text_axes,
        names=LANGUAGE,
        unlike_file=_unlike_file,
        part_of=("qwen3_5_moe",),
        gguf=(replace(_NEXT, architecture="qwen35moe", read=_read_tiled),),
        goldens={"qwen3.5 moe": {**_TINY_MIXTURE, "layer_types": _TYPES}},
    ),
)
