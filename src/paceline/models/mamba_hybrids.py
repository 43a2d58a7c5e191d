"""The families with Mamba-2 layers, alone or beside attention; see `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT, DECODER, MAMBA, MOST_ROWS, check
from paceline.models.attending import granite
from paceline.models.config import Experts, LayerConfig, Mamba2Config, ModelConfig
from paceline.models.layer_types import read_types

Raw = Mapping[str, Any]
Multiplier = Sequence[tuple[int, float]]
"""Factors of the rows of a tensor: how many rows, and the factor of each of them."""

_ANY_ROWS = MOST_ROWS
_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


def _mamba2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Mamba-2: nothing but states."""
    sizes = raw["n_groups"], raw["num_heads"], raw["state_size"], raw["head_dim"], raw["conv_kernel"]
    layer = LayerConfig(None, recurrent=_state(raw, base.activation, *sizes), attends=False, feeds=False)
    return replace(base, special=(layer,) * base.layers, norm_eps=raw["layer_norm_epsilon"])


def _granite_hybrid(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Granite 4: Granite with states in most layers, and experts beside the feed-forward part if there are any."""
    types = read_types(raw["layer_types"], base, _ATTENTION + _MAMBA, lambda _: "mamba")
    rope = base.rope if raw["position_embedding_type"] == "rope" else None
    attends = [one in _ATTENTION for one in types]
    count, experts = raw["num_local_experts"], None
    if count:
        experts = Experts(count, raw["num_experts_per_tok"], base.ffn, True, "block_sparse_moe", router="router.layer")
        experts = replace(experts, shared=raw["shared_intermediate_size"], shared_block="mlp")
    base = replace(granite(raw, base), experts=experts, ffn=raw["shared_intermediate_size"])
    if all(attends):
        return replace(base, special=(LayerConfig(rope, sparse=bool(count)),) * base.layers)
    state = _state(raw, base.activation, *_prefixed(raw, base))
    layers = [
        LayerConfig(rope, sparse=bool(count)) if one else LayerConfig(None, None, bool(count), state, attends=False)
        for one in attends
    ]
    return replace(base, special=tuple(layers))


def _bamba(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Bamba: states, and attention in a few layers."""
    state = _state(raw, base.activation, *_prefixed(raw, base))
    attends = raw["attn_layer_indices"] or ()
    layers = [
        LayerConfig(base.rope) if i in attends else LayerConfig(None, recurrent=state, attends=False)
        for i in range(base.layers)
    ]
    return replace(base, special=tuple(layers))


def _falcon_h1(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Falcon-H1: attention beside a state in every layer. (Its other factors: `multipliers`.)"""
    state = replace(_state(raw, base.activation, *_prefixed(raw, base)), norm_first=raw["mamba_norm_before_gate"])
    return replace(
        base,
        special=(LayerConfig(base.rope, recurrent=state),) * base.layers,
        embed_scale=raw["embedding_multiplier"],
        logits_divisor=1 / raw["lm_head_multiplier"],
    )


def multipliers(raw: Raw) -> dict[str, Multiplier]:
    """The factors of Falcon-H1's tensors, by the ends of their names. The model multiplies activations by them. Raises
    `CorruptModel`: tensors may be read before the rest of the config is."""
    raw = {**_FALCON_H1, **raw}
    check("config.json", raw, {**DECODER, **MAMBA})
    if "hidden_size" not in raw:
        raise CorruptModel("config.json of a falcon_h1 model lacks 'hidden_size'", CORRECT)
    key, into, out = (raw[f"{x}_multiplier"] for x in ("key", "attention_in", "attention_out"))
    gate, down = raw["mlp_multipliers"] or (1.0, 1.0)
    values = raw["mamba_d_ssm"] or raw["mamba_expand"] * raw["hidden_size"]
    keys = raw["mamba_n_groups"] * raw["mamba_d_state"]
    sizes = values, values, keys, keys, raw["mamba_n_heads"]
    parts = list(zip(sizes, raw["ssm_multipliers"] or (1.0,) * 5, strict=True))
    # Of weights and of biases.
    factors: dict[str, tuple[Multiplier, Multiplier]] = {
        "self_attn.k_proj": ([(_ANY_ROWS, into * key)], [(_ANY_ROWS, key)]),
        "mamba.in_proj": ([(count, raw["ssm_in_multiplier"] * factor) for count, factor in parts], parts),
    }
    for name in ("self_attn.q_proj", "self_attn.v_proj"):
        factors[name] = [(_ANY_ROWS, into)], [(_ANY_ROWS, 1.0)]
    whole = {"self_attn.o_proj": out, "mamba.out_proj": raw["ssm_out_multiplier"]}
    for name, factor in {**whole, "mlp.gate_proj": gate, "mlp.down_proj": down}.items():
        factors[name] = [(_ANY_ROWS, factor)], [(_ANY_ROWS, factor)]
    kinds = ("weight", "bias")
    return {f"{name}.{kind}": f for name, both in factors.items() for kind, f in zip(kinds, both, strict=True)}


def _nemotron_h(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Nemotron-H: each layer is a state, attention without positions, a feed-forward part, or experts."""
    key = "layers_block_type" if raw["layers_block_type"] else "hybrid_override_pattern"
    given = raw["layers_block_type"] or [_PATTERN.get(x, x) for x in raw["hybrid_override_pattern"] or ""]
    types = read_types(given, base, (*_ATTENTION, *_MAMBA, "mlp", "moe"), key=key)
    if raw["mlp_hidden_act"] != "relu2" or raw["moe_latent_size"] or raw["n_group"] != 1:
        raise UnsupportedModel(
            "a nemotron_h model with latent or grouped experts, or an activation other than relu2, is not supported",
            "Use another model of the family",
        )
    sizes = raw["n_groups"], raw["mamba_num_heads"], raw["ssm_state_size"], raw["mamba_head_dim"], raw["conv_kernel"]
    state, experts = _state(raw, raw["mamba_hidden_act"], *sizes), None
    if "moe" in types:
        experts = Experts(
            raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"], raw["norm_topk_prob"]
        )
        shared = raw["n_shared_experts"] * raw["moe_shared_expert_intermediate_size"]
        experts = replace(experts, shared=shared, shared_block="mlp.shared_experts", sigmoid=True)
        experts = replace(experts, scale=raw["routed_scaling_factor"])
    layers = []
    for kind in types:
        feeds = kind in ("mlp", "moe")
        recurrent = state if kind in _MAMBA else None
        layers.append(LayerConfig(None, None, kind == "moe", recurrent, attends=kind in _ATTENTION, feeds=feeds))
    eps = raw["layer_norm_epsilon"]
    return replace(
        base, special=tuple(layers), norm_eps=eps, experts=experts, activation="squared_relu", plain_mlp=True
    )


_ATTENTION, _MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _prefixed(raw: Raw, base: ModelConfig) -> tuple[int, int, int, int, int]:
    """The sizes for `_state`."""
    heads, size = raw["mamba_n_heads"], raw["mamba_d_head"]
    inner = raw.get("mamba_d_ssm") or raw["mamba_expand"] * base.hidden
    size = inner // heads if size == "auto" else size
    return raw["mamba_n_groups"], heads, raw["mamba_d_state"], size, raw["mamba_d_conv"]


def _state(raw: Raw, activation: str, groups: int, heads: int, keys: int, values: int, width: int) -> Mamba2Config:
    if activation != "silu":
        raise UnsupportedModel(f"Mamba-2 with the activation {activation!r} is not supported", "Use another model")
    if raw.get("time_step_limit") not in _LIMITS:
        raise UnsupportedModel(f"time_step_limit {raw['time_step_limit']} is not supported", "Use another model")
    return Mamba2Config(groups, heads, keys, values, width)


_PREFIXED: dict[str, Any] = {
    **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
    "mamba_expand": 2,
}
_ONES = ("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier")
_FALCON_H1: dict[str, Any] = {
    **_PREFIXED,
    **dict.fromkeys((*_ONES, "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    **{"mlp_multipliers": None, "ssm_multipliers": None, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True},
    "rms_norm_eps": 1e-5,
}

MAMBA_FAMILIES: Mapping[str, tuple[Callable[[Raw, ModelConfig], ModelConfig], dict[str, Any]]] = {
    "mamba2": (
        _mamba2,
        {
            **{"n_groups": 8, "num_heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4},
            **{"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2**20},
            # No layer attends or feeds.
            **{"num_attention_heads": 1, "intermediate_size": 1},
        },
    ),
    "granitemoehybrid": (
        _granite_hybrid,
        {
            **_PREFIXED,
            **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), 1.0),
            **{"logits_scaling": 1.0, "layer_types": None, "position_embedding_type": None},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        },
    ),
    "bamba": (_bamba, {**_PREFIXED, "attn_layer_indices": None, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}),
    "falcon_h1": (_falcon_h1, _FALCON_H1),
    "nemotron_h": (
        _nemotron_h,
        {
            **{"n_groups": 8, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4},
            **{"layers_block_type": None, "hybrid_override_pattern": None, "layer_norm_epsilon": 1e-5},
            **{"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None, "n_group": 1},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_shared_experts": 1},
            **{"moe_shared_expert_intermediate_size": 7688, "head_dim": 128},
        },
    ),
}
"""Model type -> its layers from its keys, and defaults of keys (see `families.Family`)."""
