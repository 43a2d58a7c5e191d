"""DeepSeek V2 and V3, and families with V3's layers (Kimi K2, GLM-4.7-Flash).

They have multi-head latent attention (MLA), and mixtures of experts in all layers except the first ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw, experts_named, shared_expert_named
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import (
    EXPERT_COUNT,
    EXPERTS,
    FACTOR,
    FIX_INVALID_FILE,
    FLAG,
    LAYERS,
    MAX_ROWS,
    NULL,
    ROWS,
    SIZE,
    TEXT,
    FieldKind,
    each,
    integer,
    list_of,
    number,
)
from paceline.models.config import AttentionConfig, Groups, LatentConfig, LayerConfig, MixtureConfig, ModelConfig
from paceline.models.rope import scaling_of

SCORE_BIAS = {".mlp.gate.e_score_correction_bias": ".mlp.expert_bias"}
BIAS = {"exp_probs_b.bias": "mlp.expert_bias"}
"""Name, in GGUF files, of the bias of the experts' scores. In folders, its name is `SCORE_BIAS`."""
GROUPED_KEYS: dict[str, FieldKind] = {
    **each(EXPERT_COUNT | NULL, "num_experts_per_tok", "n_group", "topk_group"),
    **each(integer(0, EXPERTS) | NULL, "n_routed_experts", "n_shared_experts"),
    "moe_intermediate_size": ROWS,
    "first_k_dense_replace": integer(0, LAYERS) | NULL,
    "moe_layer_freq": integer(1),
    "routed_scaling_factor": FACTOR,
    "norm_topk_prob": FLAG | NULL,
    "scoring_func": TEXT,
    "topk_method": TEXT,
    "mlp_layer_types": list_of(TEXT) | NULL,
}
"""Config keys of mixtures whose experts are in groups."""
_KEYS = {
    **GROUPED_KEYS,
    **each(integer(1, 2**16), "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    "qk_rope_head_dim": integer(2, 2**16),
    "q_lora_rank": integer(0, 2**16) | NULL,
    "rope_interleave": FLAG | NULL,
}
_COMMON: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_layer_freq": 1,
    "mlp_layer_types": None,
}
_V2: dict[str, Any] = {
    **_COMMON,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}
_V3: dict[str, Any] = {
    **_COMMON,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_FLASH: dict[str, Any] = {
    **_V3,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}


def _deepseek(raw: Raw, base: ModelConfig, sigmoid: bool = True) -> ModelConfig:
    """Add multi-head latent attention (MLA) and mixtures of experts.

    Args:
        raw: The config.
        base: The common part. Its `head_dim` is the size of the rotary part of a head.
        sigmoid: See `read_experts`.
    """
    latent = LatentConfig(
        raw["kv_lora_rank"],
        raw["q_lora_rank"] or 0,
        raw["qk_nope_head_dim"],
        raw["qk_rope_head_dim"],
        raw["v_head_dim"],
    )
    if base.heads * (latent.plain + latent.rotary + latent.value) > MAX_ROWS:
        raise CorruptModel(f"{base.heads} heads of {latent} exceed the maximum of {MAX_ROWS:,} rows", FIX_INVALID_FILE)
    experts = read_experts(raw, sigmoid) if raw["n_routed_experts"] else None
    dense = min(base.layers, (raw["first_k_dense_replace"] or 0) if experts else base.layers)
    kinds = raw["mlp_layer_types"] or [_KINDS[False]] * dense + [_KINDS[True]] * (base.layers - dense)
    if _KINDS[True] in kinds and not experts:
        raise CorruptModel("mlp_layer_types names sparse layers, and n_routed_experts is 0", FIX_INVALID_FILE)
    if len(kinds) != base.layers or {*kinds} - {*_KINDS}:
        raise CorruptModel(
            f"mlp_layer_types must name {base.layers} layers, each {' or '.join(_KINDS)}", FIX_INVALID_FILE
        )
    scale = (latent.plain + latent.rotary) ** -0.5 * _temperature(raw, base) ** 2
    rope = replace(base.rope, interleaved=raw["rope_interleave"] is not False)
    return replace(
        base,
        rope=rope,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary,
        attention=AttentionConfig(scale=scale, latent=latent),
        mixture=experts,
        special=tuple(LayerConfig(rope, sparse=kind == _KINDS[True]) for kind in kinds),
    )


_KINDS = ("dense", "sparse")
_METHODS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
"""Scoring function -> the methods of selecting experts that are supported with it."""


def read_experts(raw: Raw, sigmoid: bool = True) -> MixtureConfig:
    """Return the experts of a config with DeepSeek's keys.

    Args:
        raw: The config.
        sigmoid: True if scores are computed by sigmoid, as in V3. False if they are computed by softmax.
    """
    scoring, method = "sigmoid" if sigmoid else "softmax", raw["topk_method"]
    if raw["scoring_func"] != scoring or method not in _METHODS[scoring] or raw["moe_layer_freq"] != 1:
        raise UnsupportedModel(
            f"a {raw['model_type']} model with experts by {raw['scoring_func']} and {method} and a moe_layer_freq of "
            f"{raw['moe_layer_freq']} is not supported",
            f"Published models have {scoring} and {' or '.join(_METHODS[scoring])}, and a moe_layer_freq of 1",
        )
    if not sigmoid and raw["norm_topk_prob"]:  # DeepSeek's code, transformers and llama.cpp scale them differently
        raise UnsupportedModel(
            "a deepseek_v2 model with norm_topk_prob is not supported", "Use a published model, which does not set it"
        )
    count, used, width = raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"]
    if used is None:
        raise CorruptModel("num_experts_per_tok must be a whole number", FIX_INVALID_FILE)
    groups = Groups(raw["n_group"] or 1, raw["topk_group"] or 1, 2 if sigmoid else 1)
    limited = groups.used < groups.count and (sigmoid or method == "group_limited_greedy")
    if limited and (count % groups.count or used > groups.used * (count // groups.count)):
        raise CorruptModel(
            f"{used} of {count} experts in {groups.used} of {groups.count} groups do not fit", FIX_INVALID_FILE
        )
    return MixtureConfig(
        count,
        used,
        width,
        normalised=bool(raw["norm_topk_prob"]),
        shared=width * (raw["n_shared_experts"] or 0),
        shared_block="mlp.shared_experts",
        sigmoid=sigmoid,
        scale=raw["routed_scaling_factor"],
        groups=groups if limited else None,
    )


def _temperature(raw: Raw, base: ModelConfig) -> float:
    """Return the factor that YaRN applies to whole queries and keys, in addition to the factor for their rotary
    parts."""
    by = scaling_of(raw).get("mscale_all_dim")
    factor = dict(base.rope.scaling).get("factor", 1.0)
    return 0.1 * by * math.log(factor) + 1.0 if base.rope.kind == "yarn" and by and factor > 1 else 1.0


def _read(meta: Metadata, config: Config) -> Config:
    """Read V2, V3, or another model with V3's layers. The scoring function of the experts distinguishes V2 from the
    others.

    In newer files, `key_length` and `value_length` are the sizes of a row in the cache. The sizes of heads then have
    keys that end in `_mla`.
    """
    tensors = meta.file.tensors
    if meta.get("attention.temperature_scale"):
        raise UnsupportedModel(f"{meta.file.path.name} scales queries by their position", "Use another model")
    biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
    sigmoid = meta.get("expert_gating_func") == 2 or (biased and not meta.get("expert_gating_func"))
    rotary = meta["rope.dimension_count"]
    experts = read_gguf_experts(meta)
    limited = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    scaling, multiplier = config["rope_scaling"], meta.get("rope.scaling.yarn_log_multiplier")
    if scaling and multiplier:
        scaling = scaling | dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    return {
        **experts,
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "rope_scaling": scaling,
        "head_dim": rotary,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": meta["attention.kv_lora_rank"],
        "q_lora_rank": meta["attention.q_lora_rank"] if any(".attn_q_a." in name for name in tensors) else 0,
        "qk_nope_head_dim": (meta.get("attention.key_length_mla") or meta["attention.key_length"]) - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": meta.get("attention.value_length_mla") or meta["attention.value_length"],
        "mlp_layer_types": [
            "sparse" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "dense"
            for i in range(config["num_hidden_layers"])
        ],
        "topk_method": "noaux_tc" if sigmoid else limited,
    }


def read_gguf_experts(meta: Metadata) -> Config:
    """Return the experts of a GGUF file, as DeepSeek's configs name them."""
    return {
        "n_routed_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta["expert_used_count"] if meta.get("expert_count", 0) else None,
        "n_shared_experts": meta.get("expert_shared_count", 0),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
        "n_group": meta.get("expert_group_count", 0) or 1,
        "topk_group": meta["expert_group_used_count"] if meta.get("expert_group_count", 0) > 1 else 1,
    }


_GGUF = GGUFLayout(
    "deepseek2",
    {
        **LAYER,
        "ffn_gate_inp": "mlp.gate",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
        **{f"attn_{part}_a_norm": f"self_attn.{part}_a_layernorm" for part in ("q", "kv")},
        **shared_expert_named("mlp.shared_experts"),
    },
    experts_named("mlp.experts"),
    BIAS,
    read=_read,
    keys={
        **each(SIZE, "attention.key_length_mla", "attention.value_length_mla"),
        **each(integer(0, 2**16), "attention.q_lora_rank", "attention.kv_lora_rank"),
        "attention.temperature_scale": number(0, 1e9),
        "rope.scaling.yarn_log_multiplier": number(0, 1e6),
        "expert_gating_func": integer(0, 1000),
    },
    own_sizes=True,
)
_TINY: dict[str, Any] = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
_V3_FAMILY = partial(
    Family, keys=_KEYS, refine=_deepseek, rotary_key="qk_rope_head_dim", names=SCORE_BIAS, mtp_follows=True
)

FAMILIES = (
    _V3_FAMILY(
        "deepseek_v2",
        "DeepSeek V2",
        _V2,
        refine=partial(_deepseek, sigmoid=False),
        gguf=(_GGUF,),
        goldens={
            "deepseek v2": {**_TINY, "topk_method": "greedy"},
            "deepseek v2, no query latent, groups, stretched": {
                **_TINY,
                **_GROUPS,
                "q_lora_rank": None,
                "topk_method": "group_limited_greedy",
                "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            },
        },
    ),
    _V3_FAMILY(
        "deepseek_v3",
        "DeepSeek V3, R1, Kimi K2",
        _V3,
        goldens={
            "deepseek v3": {**_TINY, **_GROUPS, "attention_bias": True},
            "deepseek v3, halves, stretched": {
                **_TINY,
                **_GROUPS,
                "rope_interleave": False,
                "norm_topk_prob": False,
                "q_lora_rank": None,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.3},
            },
        },
    ),
    _V3_FAMILY("kimi_k2", "", _V3),
    _V3_FAMILY(
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        _FLASH,
        goldens={"glm 4.7 flash": {**_TINY, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}},
    ),
)
