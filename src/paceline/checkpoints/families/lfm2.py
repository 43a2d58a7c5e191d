"""LFM2: short convolutions, and attention in some layers. LFM2-MoE also has experts, except in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.checkpoints.families.deepseek import BIAS
from paceline.checkpoints.families.qwen import LANGUAGE
from paceline.checkpoints.family import LAYER, MIXTURE_KEYS, QK_NORMS, Family, GGUFLayout, Raw, experts_named
from paceline.checkpoints.gguf_metadata import Config, Metadata, sizes_of_all_layers
from paceline.checkpoints.layer_plans import FULL, read_types
from paceline.files.schema import EPS, FACTOR, FLAG, LAYERS, MAX_ROWS, NULL, ROWS, FieldKind, integer, list_of, number
from paceline.models.config import LayerConfig, MixtureConfig, ModelConfig, NormConfig, ShortConvConfig

_CONV, _EXPERT = "conv", ("w1", "w3", "w2")


def _lfm2(raw: Raw, base: ModelConfig, dense: int | None = None) -> ModelConfig:
    """Build the layers. The first `dense` layers have no experts. If `dense` is None, no layer has experts."""
    attends = raw.get("full_attn_idxs")
    types = read_types(
        raw.get("layer_types"),
        base,
        (FULL, _CONV),
        lambda i: FULL if attends is None or i in attends else _CONV,
    )
    recurrent = ShortConvConfig(base.hidden, raw["conv_L_cache"])
    sparse = [dense is not None and i >= dense for i in range(base.layers)]
    layers = [
        LayerConfig(None, sparse=one, recurrent=recurrent, attends=False)
        if kind == _CONV
        else LayerConfig(base.rope, sparse=one)
        for kind, one in zip(types, sparse, strict=True)
    ]
    ffn = raw.get("block_ff_dim") or base.ffn
    if raw["block_auto_adjust_ff_dim"]:
        ffn, multiple = int(2 * ffn / 3), raw["block_multiple_of"]
        if raw["block_ffn_dim_multiplier"] is not None:
            ffn = -(-int(raw["block_ffn_dim_multiplier"] * ffn) // multiple) * multiple
    return replace(base, special=tuple(layers), ffn=ffn, norms=NormConfig(raw["norm_eps"], heads="shared"))


def _lfm2_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    used, width = raw["num_experts_per_tok"], raw["moe_intermediate_size"]
    experts = MixtureConfig(
        raw["num_experts"],
        used,
        width,
        normalised=raw["norm_topk_prob"],
        names=_EXPERT,
        sigmoid=True,
        scale=raw["routed_scaling_factor"],
    )
    return replace(_lfm2(raw, base, raw["num_dense_layers"]), mixture=experts)


def _read(meta: Metadata, config: Config) -> Config:
    """Read the sizes of convolutions. Layers without key heads have no attention."""
    attends = sizes_of_all_layers(meta, config, "attention.head_count_kv")
    return {
        "layer_types": [FULL if one else _CONV for one in attends],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": meta["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }


def _read_moe(meta: Metadata, config: Config) -> Config:
    return {
        **_read(meta, config),
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
    }


_GGUF = GGUFLayout(
    "lfm2",
    {
        **LAYER,
        **QK_NORMS,
        "ffn_gate_inp": "mlp.gate",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
    experts_named("mlp.experts", _EXPERT),
    BIAS,
    {"token_embd_norm.weight": "model.norm.weight"},
    read=_read,
    keys={"shortconv.l_cache": integer(1, 64)},
    uneven=True,
)
_NAMES = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.": ".mlp.",
}
_DEFAULTS: dict[str, Any] = {
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
_KEYS: dict[str, FieldKind] = {
    "norm_eps": EPS,
    "conv_L_cache": integer(1, 64),
    "full_attn_idxs": list_of(integer()) | NULL,
    "block_ff_dim": ROWS | NULL,
    "block_auto_adjust_ff_dim": FLAG,
    "block_multiple_of": integer(1, MAX_ROWS),
    "block_ffn_dim_multiplier": number(0, 1e3) | NULL,
}
_TINY = {
    "num_attention_heads": 4,
    "head_dim": 12,
    "full_attn_idxs": [1],
    "block_multiple_of": 16,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

FAMILIES = (
    Family(
        "lfm2",
        "LFM2",
        _DEFAULTS,
        _KEYS,
        _lfm2,
        names={**LANGUAGE, **_NAMES},
        part_of=("lfm2_vl",),
        gguf=(_GGUF,),
        goldens={
            "lfm2": _TINY,
            "lfm2 with biases, own width": {
                **{key: value for key, value in _TINY.items() if key != "layer_types"},
                "conv_bias": True,
                "block_auto_adjust_ff_dim": False,
            },
        },
    ),
    Family(
        "lfm2_moe",
        "LFM2, experts",
        {
            **_DEFAULTS,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "intermediate_size": 7168,
            "block_auto_adjust_ff_dim": False,
        },
        {**_KEYS, **MIXTURE_KEYS, "num_dense_layers": integer(0, LAYERS), "routed_scaling_factor": FACTOR},
        _lfm2_moe,
        names=_NAMES,
        gguf=(replace(_GGUF, architecture="lfm2moe", read=_read_moe),),
        goldens={
            "lfm2 moe": {
                **_TINY,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "num_dense_layers": 1,
            }
        },
    ),
)
