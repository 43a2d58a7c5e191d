"""Families whose experts have scores of their own, by sigmoid: GLM-4.5 and Llama 4; see `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT
from paceline.models.config import Experts, LayerConfig, ModelConfig, RopeConfig
from paceline.models.deepseek import read_experts

Raw = Mapping[str, Any]


def glm4_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    """GLM-4.5 to 4.7: GLM-4's attention, and DeepSeek-V3's experts above the first layers."""
    experts, dense = read_experts(raw) if raw["n_routed_experts"] else None, raw["first_k_dense_replace"] or 0
    layers = [LayerConfig(base.rope, sparse=experts is not None and i >= dense) for i in range(base.layers)]
    return replace(base, special=tuple(layers), experts=experts, qk_norm=raw["use_qk_norm"])


GLM4_MOE: dict[str, Any] = {
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
    **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    **{"use_qk_norm": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
}


def llama4(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Llama 4: layers that see their own part of the text, and every few layers one that sees everything, with queries
    that grow with the position in the place of rotary embedding."""
    rotates = raw["no_rope_layers"] or [(i + 1) % raw["no_rope_layer_interval"] != 0 for i in range(base.layers)]
    types = raw["layer_types"] or [_CHUNKED[not one] for one in rotates]
    if len(rotates) != base.layers or len(types) != base.layers or {*types} - {*_CHUNKED}:
        raise CorruptModel(f"layer_types and no_rope_layers must name {base.layers} layers", CORRECT)
    if raw["use_qk_norm"] and dict(base.rope.scaling).get("attention_factor", 1.0) != 1.0:
        raise UnsupportedModel("norms after a rotary embedding that scales are not supported", "Use another model")
    step, chunk, width = raw["interleave_moe_layer_step"], raw["attention_chunk_size"], raw["intermediate_size"]
    given = raw["moe_layers"]
    sparse = [(step and (i + 1) % step == 0) if given is None else i in given for i in range(base.layers)]
    tuned = (("floor", float(raw["floor_scale"])), ("scale", float(raw["attn_scale"])))
    temperature = RopeConfig(kind="temperature", scaling=tuned) if raw["attn_temperature_tuning"] else None
    bounded = [chunk and chunk < base.context_length and kind == _CHUNKED[False] for kind in types]
    layers = [
        LayerConfig(
            base.rope if rotates[i] else None,
            chunk if bounded[i] else None,
            sparse=bool(sparse[i]),
            chunked=bool(bounded[i]),
            temperature=None if rotates[i] else temperature,
            unit_heads=bool(raw["use_qk_norm"] and rotates[i]),
        )
        for i in range(base.layers)
    ]
    experts = Experts(
        *(raw["num_local_experts"], raw["num_experts_per_tok"], width, False),
        router="router",
        shared=width,
        sigmoid=True,
        weighs_inputs=True,
    )
    ffn, experts_or_none = raw["intermediate_size_mlp"], experts if any(sparse) else None
    return replace(base, special=tuple(layers), ffn=ffn, experts=experts_or_none, paired=True)


_CHUNKED = ("chunked_attention", "full_attention")
LLAMA4: dict[str, Any] = {
    **{"intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1, "moe_layers": None},
    **{"interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": None, "no_rope_layer_interval": 4},
    **{"attention_chunk_size": 8192, "layer_types": None, "attn_temperature_tuning": True},
    **{"floor_scale": 8192, "attn_scale": 0.1, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
}
