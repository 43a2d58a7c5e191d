"""Gemma 4.

Layers with full attention have another head size than the other layers. Upper layers share the keys and values of lower
layers. There are per-layer embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.checkpoints.families.qwen import LANGUAGE
from paceline.checkpoints.family import LAYER, POST_NORMS, QK_NORMS, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import ROPE_FACTORS, Config, Metadata, layer_types, sizes_by_layer
from paceline.checkpoints.layer_plans import FULL, SLIDING, read_types
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import (
    EXPERT_COUNT,
    FIX_INVALID_FILE,
    FLAG,
    LAYERS,
    MAX_ROWS,
    NULL,
    OBJECT,
    ROWS,
    SIZE,
    TEXT,
    check,
    check_value,
    each,
    integer,
)
from paceline.models.config import AttentionConfig, LayerConfig, MixtureConfig, ModelConfig, NormConfig, RopeConfig
from paceline.models.rope import read_rope

_ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_OWN_SIZES = each(SIZE, "head_dim", "num_key_value_heads")
"""Config keys of the sizes that each layer may set for itself."""


def _gemma4(raw: Raw, base: ModelConfig) -> ModelConfig:
    if raw["use_bidirectional_attention"] == "all":
        raise UnsupportedModel("a Gemma 4 with bidirectional attention does not generate text", "Use a language model")
    inputs = raw["hidden_size_per_layer_input"] or 0
    if inputs and raw.get("vocab_size_per_layer_input", base.vocab_size) != base.vocab_size:
        raise UnsupportedModel(
            "per-layer embeddings with a vocabulary of their own are not supported", "Use another model"
        )
    experts = None
    if raw["enable_moe_block"]:
        sizes = [raw[key] for key in ("num_experts", "top_k_experts", "moe_intermediate_size")]
        if None in sizes:
            raise CorruptModel(
                "num_experts, top_k_experts and moe_intermediate_size must be whole numbers", FIX_INVALID_FILE
            )
        experts = MixtureConfig(*sizes, normalised=True, with_dense=True)
    return replace(
        base,
        special=_layers(raw, base),
        mixture=experts,
        attention=AttentionConfig(scale=1.0),
        norms=NormConfig(base.norms.eps, after=True, heads="shared", values=True),
        layer_scale=True,
        token_inputs=inputs,
        embed_scale=base.hidden**0.5,
        final_softcap=raw["final_logit_softcapping"],
        activation=raw["hidden_activation"],
    )


def _layers(raw: Raw, base: ModelConfig) -> tuple[LayerConfig, ...]:
    types = read_types(raw["layer_types"], base, (FULL, SLIDING), lambda i: FULL if (i + 1) % 6 == 0 else SLIDING)
    types[-1] = FULL  # as transformers does
    own = base.layers - raw["num_kv_shared_layers"]
    # A model without keys of its own is an assistant, which reads the target's keys (`assistant.py`).
    if own and not {*types[own:]} <= {*types[: max(0, own)]}:
        raise CorruptModel(
            f"{raw['num_kv_shared_layers']} layers share keys, but no other layer has keys to share", FIX_INVALID_FILE
        )
    sizes = _sizes(raw, base, types)
    ropes = {kind: _rope(raw, kind, sizes[types.index(kind)]["head_dim"]) for kind in {*types}}
    return tuple(
        LayerConfig(
            ropes[kind],
            raw["sliding_window"] if kind == SLIDING and raw["sliding_window"] < base.context_length else None,
            sparse=raw["enable_moe_block"],
            kv_heads=size["num_key_value_heads"],
            head_dim=size["head_dim"],
            ffn=base.ffn * 2 if raw["use_double_wide_mlp"] and i >= own else 0,
            source=_last(types[:own], kind) if own and i >= own else None,
            keys_as_values=raw["attention_k_eq_v"] and kind == FULL,
        )
        for i, (kind, size) in enumerate(zip(types, sizes, strict=True))
    )


def _sizes(raw: Raw, base: ModelConfig, types: Sequence[str]) -> list[dict[str, int]]:
    """Return, for each layer, the number and the size of its key heads."""
    common = {"head_dim": base.head_dim, "num_key_value_heads": base.kv_heads}
    wide = {"head_dim": raw["global_head_dim"] or base.head_dim, "num_key_value_heads": base.kv_heads}
    if raw["attention_k_eq_v"] and raw["num_global_key_value_heads"]:
        wide["num_key_value_heads"] = raw["num_global_key_value_heads"]
    sizes = [dict(common) for _ in types]
    given = raw.get("per_layer_config")
    for i, kind in enumerate(types):
        if given is None and kind == FULL:
            sizes[i] = wide
        elif own := (given or {}).get(str(i)):
            check_value("config.json", f"per_layer_config.{i}", own, OBJECT)
            check(f"per_layer_config.{i}", own, _OWN_SIZES)
            if strange := {*own} - {*_OWN_SIZES}:
                raise UnsupportedModel(
                    f"layers with their own {', '.join(sorted(strange))} are not supported", "Use another model"
                )
            sizes[i] |= own
    alike = {(kind, *sorted(size.items())) for kind, size in zip(types, sizes, strict=True)}
    if len(alike) != len({*types}):
        raise UnsupportedModel("layers of one type have heads of several sizes", "Use another model")
    return sizes


def _rope(raw: Raw, kind: str, head_dim: int) -> RopeConfig:
    given = raw["rope_parameters"].get(kind)
    check_value("config.json", f"rope_parameters.{kind}", given, OBJECT)
    return read_rope(given, raw, _ROPES[kind]["rope_theta"], head_dim)


def _last(types: Sequence[str], kind: str) -> int:
    """Return the index of the last layer of a kind."""
    return len(types) - 1 - types[::-1].index(kind)


def _rope_of_sliding_layers(scaling: Raw) -> Raw:
    found = scaling.get(SLIDING) or {}
    check_value("config.json", f"rope_parameters.{SLIDING}", found, OBJECT)
    return found


def _read(meta: Metadata, config: Config) -> Config:
    """Read the sizes of both kinds of layers. A factor of at least 1e20 marks a rotary plane that does not rotate."""
    layers, types = config["num_hidden_layers"], layer_types(meta, config["num_hidden_layers"], 6)
    shared = meta.get("attention.shared_kv_layers", 0)
    widths = sizes_by_layer(meta["feed_forward_length"], layers)
    double = [widths[0] * (2 if i >= layers - shared else 1) for i in range(layers)]
    if widths not in (double, widths[:1] * layers):
        raise UnsupportedModel(f"{meta.file.path.name} has layers of different widths", "Use a uniform model")
    heads = sizes_by_layer(meta.get("attention.head_count_kv", config["num_attention_heads"]), layers)
    factors = meta.factors(ROPE_FACTORS[0]) or [1.0]
    turning = factors.count(1.0)
    if any(factor < 1e20 for factor in factors[turning:]):
        raise UnsupportedModel(
            f"{meta.file.path.name} scales some rotary wavelengths, which is not supported", "Use another model"
        )
    sizes = {FULL: config["head_dim"], SLIDING: meta.get("attention.key_length_swa", config["head_dim"])}
    all_turn = {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    near = meta.get("rope.dimension_count_swa", sizes[SLIDING]) / sizes[SLIDING]
    return {
        "num_key_value_heads": heads[0],
        "head_dim": sizes[SLIDING],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths != widths[:1] * layers,
        "layer_types": types,
        "per_layer_config": {
            str(i): {"head_dim": sizes[types[i]], "num_key_value_heads": heads[i]} for i in range(layers)
        },
        "rope_parameters": {
            FULL: {**all_turn, "rope_theta": config["rope_theta"]},
            SLIDING: {"rope_theta": meta.get("rope.freq_base_swa"), "partial_rotary_factor": near},
        },
        **dict.fromkeys(("rope_freqs", "rope_scaling")),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in meta.file.tensors for i in range(layers - shared)),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "enable_moe_block": bool(meta.get("expert_count")),
        "num_experts": meta.get("expert_count") or None,
        "top_k_experts": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
    }


_GGUF = GGUFLayout(
    "gemma4",
    {
        **LAYER,
        **POST_NORMS,
        **QK_NORMS,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
        **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    },
    {f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
    {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    {
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    read=_read,
    keys={
        **each(SIZE, "attention.key_length_swa", "rope.dimension_count_swa"),
        "embedding_length_per_layer_input": integer(0, 2**16),
        "attention.shared_kv_layers": integer(0, LAYERS),
    },
    own_sizes=True,
)
_TINY: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 5.0,
    "sliding_window": 16,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
}
_LARGE = {**_TINY, "hidden_size_per_layer_input": 0}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}

FAMILIES = (
    Family(
        "gemma4_text",
        "Gemma 4 (text)",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "sliding_window": 512,
            "layer_types": None,
            "rope_parameters": _ROPES,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": None,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        },
        {
            "hidden_activation": TEXT,
            "sliding_window": integer(1),
            "rope_parameters": OBJECT,
            **each(SIZE | NULL, "global_head_dim", "num_global_key_value_heads"),
            "use_bidirectional_attention": TEXT | NULL,
            "hidden_size_per_layer_input": integer(0, 2**16) | NULL,
            "vocab_size_per_layer_input": integer(0, MAX_ROWS),
            **each(FLAG, "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
            "num_kv_shared_layers": integer(0, LAYERS),
            "per_layer_config": OBJECT | NULL,
            **each(EXPERT_COUNT | NULL, "num_experts", "top_k_experts"),
            "moe_intermediate_size": ROWS | NULL,
        },
        _gemma4,
        _rope_of_sliding_layers,
        names=LANGUAGE,
        part_of=("gemma4",),
        gguf=(_GGUF,),
        goldens={
            "gemma4, small": {**_TINY, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "gemma4, large": {**_LARGE, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "gemma4, experts": {**_LARGE, **_EXPERTS},
            "gemma4, all at once": {
                **_TINY,
                **_EXPERTS,
                "num_kv_shared_layers": 3,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
        },
    ),
)
