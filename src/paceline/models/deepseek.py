"""DeepSeek V2 and V3, and the families that have V3's layers (Kimi K2, GLM-4.7-Flash); see `families.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT, MOST_ROWS
from paceline.models.config import Experts, Groups, LatentConfig, LayerConfig, ModelConfig

Raw = Mapping[str, Any]

_COMMON: dict[str, Any] = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"rope_interleave": True, "moe_layer_freq": 1, "mlp_layer_types": None},
}
_V2: dict[str, Any] = {
    **_COMMON,
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407},
    **{"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    **{"n_group": None, "topk_group": None, "topk_method": "greedy", "scoring_func": "softmax"},
}
_V3: dict[str, Any] = {
    **_COMMON,
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
_GLM: dict[str, Any] = {
    **_V3,
    **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
}
DEEPSEEK = {"deepseek_v2": _V2, "deepseek_v3": _V3, "kimi_k2": _V3, "glm4_moe_lite": _GLM}
"""Model type -> what its configs may omit."""


def deepseek(raw: Raw, base: ModelConfig) -> ModelConfig:
    """DeepSeek V2 and V3: latent attention, and experts above the first layers. `base` has the rotary part's size as
    that of a head."""
    latent = LatentConfig(
        raw["kv_lora_rank"],
        raw["q_lora_rank"] or 0,
        raw["qk_nope_head_dim"],
        raw["qk_rope_head_dim"],
        raw["v_head_dim"],
    )
    if base.heads * (latent.plain + latent.rotary + latent.value) > MOST_ROWS:
        raise CorruptModel(f"{base.heads} heads of {latent} are more than a matrix can have", CORRECT)
    experts = read_experts(raw) if raw["n_routed_experts"] else None
    dense = min(base.layers, (raw["first_k_dense_replace"] or 0) if experts else base.layers)
    kinds = raw["mlp_layer_types"] or [_KINDS[False]] * dense + [_KINDS[True]] * (base.layers - dense)
    if _KINDS[True] in kinds and not experts:
        raise CorruptModel("mlp_layer_types names sparse layers, and n_routed_experts is 0", CORRECT)
    if len(kinds) != base.layers or {*kinds} - {*_KINDS}:
        raise CorruptModel(f"mlp_layer_types must name {base.layers} layers, each {' or '.join(_KINDS)}", CORRECT)
    return replace(
        base,
        latent=latent,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary,
        query_scale=(latent.plain + latent.rotary) ** -0.5 * _temperature(raw, base) ** 2,
        paired=raw["rope_interleave"] is not False,
        experts=experts,
        special=tuple(LayerConfig(base.rope, sparse=kind == _KINDS[True]) for kind in kinds),
    )


_KINDS = ("dense", "sparse")
_METHODS = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
"""Scoring function -> the ways to select experts that it supports."""


def read_experts(raw: Raw) -> Experts:
    """The experts of a config with DeepSeek's keys."""
    sigmoid = raw["model_type"] != "deepseek_v2"
    scoring, method = "sigmoid" if sigmoid else "softmax", raw["topk_method"]
    if raw["scoring_func"] != scoring or method not in _METHODS[scoring] or raw["moe_layer_freq"] != 1:
        raise UnsupportedModel(
            f"a {raw['model_type']} model with experts by {raw['scoring_func']} and {method} and a moe_layer_freq of "
            f"{raw['moe_layer_freq']} is not supported",
            f"The published ones have {scoring} and {' or '.join(_METHODS[scoring])}, and a moe_layer_freq of 1",
        )
    if not sigmoid and raw["norm_topk_prob"]:  # DeepSeek's code, transformers and llama.cpp scale them differently
        raise UnsupportedModel("a deepseek_v2 model with norm_topk_prob is not supported", "The published ones do not")
    count, used, width = raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"]
    if used is None:
        raise CorruptModel("num_experts_per_tok must be a whole number", CORRECT)
    groups = Groups(raw["n_group"] or 1, raw["topk_group"] or 1, 2 if sigmoid else 1)
    limited = groups.used < groups.count and (sigmoid or method == "group_limited_greedy")
    if limited and (count % groups.count or used > groups.used * (count // groups.count)):
        raise CorruptModel(f"{used} of {count} experts in {groups.used} of {groups.count} groups do not fit", CORRECT)
    return Experts(
        count,
        used,
        width,
        bool(raw["norm_topk_prob"]),
        shared=width * (raw["n_shared_experts"] or 0),
        shared_block="mlp.shared_experts",
        sigmoid=sigmoid,
        scale=raw["routed_scaling_factor"],
        groups=groups if limited else None,
    )


def _temperature(raw: Raw, base: ModelConfig) -> float:
    """YaRN's factor of queries and keys both, beyond that of their rotary parts."""
    by = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("mscale_all_dim")
    factor = dict(base.rope.scaling).get("factor", 1.0)
    return 0.1 * by * math.log(factor) + 1.0 if base.rope.kind == "yarn" and by and factor > 1 else 1.0


def mtp_names(config: Raw) -> dict[str, str]:
    """The names of layers that predict later tokens, which follow the model's own, as Qwen's files have them."""
    layers, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if config.get("model_type") not in (*DEEPSEEK, "glm4_moe") or not isinstance(layers, int):
        return {}
    first = f"model.layers.{layers}."
    later = [(f"model.layers.{layers + i}.", f"mtp.layers.{i}.") for i in range(_count(count))]
    return {first + old: "mtp." + new for old, new in _MTP.items()} | dict(later)


def _count(given: object) -> int:
    """Of layers whose names are known. A file may have one that its config does not count."""
    return max(1, min(given, 8)) if isinstance(given, int) else 1


_MTP = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
}
