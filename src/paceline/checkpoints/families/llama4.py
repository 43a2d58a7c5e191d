"""Llama 4.

Most layers have chunked attention. One layer in every few has full attention, without a rotary embedding, and scales
its queries by a factor that grows with the position. The scores of experts are computed by sigmoid.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import (
    LAYER,
    MIXTURE_KEYS,
    Family,
    GGUFLayout,
    Raw,
    experts_named,
    shared_expert_named,
)
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.checkpoints.layer_plans import FULL
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import EXPERTS, FIX_INVALID_FILE, FLAG, LAYERS, NULL, ROWS, each, integer, list_of, number
from paceline.models.config import LayerConfig, MixtureConfig, ModelConfig, RopeConfig


def _llama4(raw: Raw, base: ModelConfig) -> ModelConfig:
    layers, width = _layers(raw, base), raw["intermediate_size"]
    experts = MixtureConfig(
        raw["num_local_experts"],
        raw["num_experts_per_tok"],
        width,
        normalised=False,
        router="router",
        shared=width,
        sigmoid=True,
        weighs_inputs=True,
    )
    used = experts if any(layer.sparse for layer in layers) else None
    return replace(base, special=layers, ffn=raw["intermediate_size_mlp"], mixture=used)


def _layers(raw: Raw, base: ModelConfig) -> tuple[LayerConfig, ...]:
    rotates = raw["no_rope_layers"] or [(i + 1) % raw["no_rope_layer_interval"] != 0 for i in range(base.layers)]
    types = raw["layer_types"] or [_CHUNKED[not one] for one in rotates]
    if len(rotates) != base.layers or len(types) != base.layers or {*types} - {*_CHUNKED}:
        raise CorruptModel(f"layer_types and no_rope_layers must name {base.layers} layers", FIX_INVALID_FILE)
    if raw["use_qk_norm"] and dict(base.rope.scaling).get("attention_factor", 1.0) != 1.0:
        raise UnsupportedModel("norms after a rotary embedding that scales are not supported", "Use another model")
    step, chunk, given = raw["interleave_moe_layer_step"], raw["attention_chunk_size"], raw["moe_layers"]
    sparse = [(step and (i + 1) % step == 0) if given is None else i in given for i in range(base.layers)]
    tuned = (("floor", float(raw["floor_scale"])), ("scale", float(raw["attn_scale"])))
    temperature = RopeConfig(kind="temperature", scaling=tuned) if raw["attn_temperature_tuning"] else None
    bounded = [chunk and chunk < base.context_length and kind == _CHUNKED[False] for kind in types]
    return tuple(
        LayerConfig(
            base.rope if rotates[i] else None,
            chunk if bounded[i] else None,
            sparse=bool(sparse[i]),
            chunked=bool(bounded[i]),
            temperature=None if rotates[i] else temperature,
            unit_heads=bool(raw["use_qk_norm"] and rotates[i]),
        )
        for i in range(base.layers)
    )


_CHUNKED = ("chunked_attention", FULL)
_MAVERICK = 128
"""Number of experts of the only Llama 4 model without QK-norm. llama.cpp also identifies that model by this number."""


def _read(meta: Metadata, config: Config) -> Config:
    """Read the experts, if there are any. Small models (MobileLLM-R1) have none.

    The metadata contains no chunk sizes and temperatures, but they are the same for all models.
    """
    whole_text = meta.get("attention.sliding_window") == 0
    count = meta.get("expert_count", 0)
    return {
        "intermediate_size": meta["expert_feed_forward_length"] if count else config["intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": count,
        "num_experts_per_tok": meta["expert_used_count"] if count else 0,
        "interleave_moe_layer_step": meta["interleave_moe_layer_step"] if count else 0,
        "use_qk_norm": count != _MAVERICK,
        "no_rope_layers": [1] * config["num_hidden_layers"] if whole_text else None,
        "layer_types": [FULL] * config["num_hidden_layers"] if whole_text else None,
    }


_TINY = {
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 80,
    "num_local_experts": 5,
    "attention_chunk_size": 4096,
    "floor_scale": 7,
}
_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "low_freq_factor": 1.0,
}

FAMILIES = (
    Family(
        "llama4_text",
        "Llama 4 (text)",
        {
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        {
            **MIXTURE_KEYS,
            **each(integer(0, EXPERTS), "num_local_experts", "num_experts_per_tok"),
            "intermediate_size_mlp": ROWS,
            "moe_layers": list_of(integer()) | NULL,
            "use_qk_norm": FLAG,
            "interleave_moe_layer_step": integer(),
            "no_rope_layers": list_of(integer(0, 1)) | NULL,
            "no_rope_layer_interval": integer(1),
            "attention_chunk_size": integer(1) | NULL,
            "attn_temperature_tuning": FLAG | integer(),
            "floor_scale": integer(1),
            "attn_scale": number(0, 1e3),
        },
        _llama4,
        interleaved=True,
        names={"language_model.": "", ".feed_forward.": ".mlp."},
        transposed=True,
        part_of=("llama4",),
        gguf=(
            GGUFLayout(
                "llama4",
                {**LAYER, "ffn_gate_inp": "mlp.router", **shared_expert_named("mlp.shared_expert")},
                experts_named("mlp.experts"),
                read=_read,
                keys={"interleave_moe_layer_step": integer(0, LAYERS)},
            ),
        ),
        goldens={
            "llama4": {**_TINY, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2},
            "llama4 as published": {
                **_TINY,
                "attention_chunk_size": 8192,
                "floor_scale": 8192,
                "rope_parameters": {**_ROPE, "high_freq_factor": 1.0},
            },
            "llama4, sliding": {
                **_TINY,
                "attention_chunk_size": 20,
                "no_rope_layers": [1, 0, 1, 1],
                "num_experts_per_tok": 2,
                "rope_parameters": {**_ROPE, "high_freq_factor": 4.0},
            },
            "llama4 without experts": {
                **_TINY,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "interleave_moe_layer_step": 0,
                "moe_layers": [],
                "no_rope_layers": [1] * 4,
                "layer_types": ["full_attention"] * 4,
            },
            "llama4, dense": {**_TINY, "moe_layers": [], "use_qk_norm": False, "attn_scale": 0.5},
        },
    ),
)
