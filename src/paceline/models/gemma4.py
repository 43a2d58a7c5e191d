"""Gemma 4; see `families.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT, GEMMA4_LAYER, OBJECT, check, check_value
from paceline.models.config import Experts, LayerConfig, ModelConfig, RopeConfig
from paceline.models.layer_types import FULL, SLIDING, read_types
from paceline.models.rope import read_rope

Raw = Mapping[str, Any]

ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "sliding_window": 512,
    "layer_types": None,
    "rope_parameters": ROPES,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}


def gemma4(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Gemma 4: heads of another size where a layer sees everything, upper layers that share keys and values, inputs of
    each layer by the token."""
    if raw["use_bidirectional_attention"] == "all":
        raise UnsupportedModel("a Gemma 4 whose tokens see later ones writes no text", "Use a language model")
    inputs = raw["hidden_size_per_layer_input"] or 0
    if inputs and raw.get("vocab_size_per_layer_input", base.vocab_size) != base.vocab_size:
        raise UnsupportedModel("tables of another vocabulary for each layer are not supported", "Use another model")
    experts = None
    if raw["enable_moe_block"]:
        experts = Experts(raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"], True, beside=True)
    return replace(
        base,
        special=_layers(raw, base),
        experts=experts,
        qk_norm=True,
        sandwich=True,
        value_norm=True,
        layer_scale=True,
        token_inputs=inputs,
        embed_scale=base.hidden**0.5,
        query_scale=1.0,
        final_softcap=raw["final_logit_softcapping"],
        activation=raw["hidden_activation"],
    )


def _layers(raw: Raw, base: ModelConfig) -> tuple[LayerConfig, ...]:
    types = read_types(raw["layer_types"], base, (FULL, SLIDING), lambda i: FULL if (i + 1) % 6 == 0 else SLIDING)
    types[-1] = FULL  # as transformers forces it
    own = base.layers - raw["num_kv_shared_layers"]
    # A model without any keys of its own is an assistant, which sees another's (`assistant.py`).
    if own and not {*types[own:]} <= {*types[: max(0, own)]}:
        raise CorruptModel(f"{raw['num_kv_shared_layers']} layers share keys that no other layer has", CORRECT)
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
    """Number and size of each layer's key heads: for all layers that see everything, or one by one."""
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
            check(f"per_layer_config.{i}", own, GEMMA4_LAYER)
            if strange := {*own} - {*GEMMA4_LAYER}:
                raise UnsupportedModel(f"layers with their own {', '.join(sorted(strange))}", "Use another model")
            sizes[i] |= own
    alike = {(kind, *sorted(size.items())) for kind, size in zip(types, sizes, strict=True)}
    if len(alike) != len({*types}):
        raise UnsupportedModel("layers of one type have heads of several sizes", "Use another model")
    return sizes


def _rope(raw: Raw, kind: str, head_dim: int) -> RopeConfig:
    given = raw["rope_parameters"].get(kind)
    check_value("config.json", f"rope_parameters.{kind}", given, OBJECT)
    return read_rope(given, raw, ROPES[kind]["rope_theta"], head_dim)


def _last(types: Sequence[str], kind: str) -> int:
    """The last layer of a kind."""
    return len(types) - 1 - types[::-1].index(kind)
