"""Mamba-2, whose layers have only states, and Bamba, which has attention in a few layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata
from paceline.errors import UnsupportedModel
from paceline.files.schema import EPS, HEAD_COUNT, NULL, FieldKind, each, integer, list_of
from paceline.models.config import LayerConfig, Mamba2Config, ModelConfig, NormConfig

MIXER_NAMES = {
    "backbone.": "model.",
    ".embeddings.": ".embed_tokens.",
    ".norm.": ".input_layernorm.",
    ".mixer.input_layernorm.": ".mamba.norm.",
    ".norm_f.": ".norm.",
    **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in "qkvo"},
    ".mixer.gate.e_score_correction_bias": ".mlp.expert_bias",
    **{f".mixer.{x}.": f".mlp.{x}." for x in ("up_proj", "down_proj", "experts", "gate", "shared_experts")},
    ".mixer.": ".mamba.",
}
"""Tensor names of models whose layers each have a single mixer."""
BAMBA_NAMES = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
}
MAMBA_LAYER = {
    **LAYER,
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_EXACT_NAMES = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
BAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""Default sizes of states, under the keys of Bamba's configs."""
BAMBA_KEYS: dict[str, FieldKind] = {
    **each(HEAD_COUNT, "mamba_n_heads", "mamba_n_groups"),
    "mamba_d_state": integer(1, 4096),
    "mamba_d_conv": integer(1, 64),
    "mamba_expand": integer(1, 64),
    "mamba_d_head": integer(1, 4096) | FieldKind('"auto"', lambda value: value == "auto", '"auto"'),
}
TINY_STATE = {
    "num_attention_heads": 4,
    "head_dim": 16,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
}
_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


def state_of(raw: Raw, activation: str, *, groups: int, heads: int, keys: int, values: int, width: int) -> Mamba2Config:
    """Return the config of a layer's state with these sizes.

    Raises:
        UnsupportedModel: If the activation or the limit of time steps differs from the published models.
    """
    if activation != "silu":
        raise UnsupportedModel(f"Mamba-2 with the activation {activation!r} is not supported", "Use another model")
    if raw.get("time_step_limit") not in _LIMITS:
        raise UnsupportedModel(f"time_step_limit {raw['time_step_limit']} is not supported", "Use another model")
    return Mamba2Config(groups, heads, keys, values, width)


def bamba_state(raw: Raw, base: ModelConfig) -> Mamba2Config:
    """Return the config of a layer's state, from a config with Bamba's keys."""
    heads, size = raw["mamba_n_heads"], raw["mamba_d_head"]
    inner = raw.get("mamba_d_ssm") or raw["mamba_expand"] * base.hidden
    return state_of(
        raw,
        base.activation,
        groups=raw["mamba_n_groups"],
        heads=heads,
        keys=raw["mamba_d_state"],
        values=inner // heads if size == "auto" else size,
        width=raw["mamba_d_conv"],
    )


def read_state(meta: Metadata, prefix: str = "mamba_") -> Config:
    """Return the sizes of states in a GGUF file, under the keys of Bamba's configs."""
    heads = meta["ssm.time_step_rank"]
    names = {"n_heads": heads, "d_head": meta["ssm.inner_size"] // heads, "d_conv": meta["ssm.conv_kernel"]}
    names |= {"d_state": meta["ssm.state_size"], "n_groups": meta["ssm.group_count"]}
    return {prefix + name: size for name, size in names.items()}


def _mamba2(raw: Raw, base: ModelConfig) -> ModelConfig:
    state = state_of(
        raw,
        base.activation,
        groups=raw["n_groups"],
        heads=raw["num_heads"],
        keys=raw["state_size"],
        values=raw["head_dim"],
        width=raw["conv_kernel"],
    )
    layer = LayerConfig(None, recurrent=state, attends=False, feeds=False)
    return replace(base, special=(layer,) * base.layers, norms=NormConfig(raw["layer_norm_epsilon"]))


def _bamba(raw: Raw, base: ModelConfig) -> ModelConfig:
    state = LayerConfig(None, recurrent=bamba_state(raw, base), attends=False)
    attends = raw["attn_layer_indices"] or ()
    return replace(base, special=tuple(LayerConfig(base.rope) if i in attends else state for i in range(base.layers)))


def _read(meta: Metadata, config: Config) -> Config:
    sizes = read_state(meta, "")
    return {
        "num_heads": sizes["n_heads"],
        "head_dim": sizes["d_head"],
        "intermediate_size": 1,
        "n_groups": sizes["n_groups"],
        "state_size": sizes["d_state"],
        "conv_kernel": sizes["d_conv"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


FAMILIES = (
    Family(
        "mamba2",
        "Mamba 2, Codestral Mamba",
        {
            "n_groups": 8,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2**20,
            # No layer has attention or an MLP.
            "num_attention_heads": 1,
            "intermediate_size": 1,
        },
        {
            **each(HEAD_COUNT, "num_heads", "n_groups"),
            **each(integer(1, 4096), "head_dim", "state_size"),
            "conv_kernel": integer(1, 64),
            "layer_norm_epsilon": EPS,
        },
        _mamba2,
        names=MIXER_NAMES,
        gguf=(GGUFLayout("mamba2", MAMBA_LAYER, exact_names=MAMBA_EXACT_NAMES, read=_read),),
        goldens={
            "mamba-2": {"num_attention_heads": 4, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2},
            "mamba-2 with biases, one group": {
                "num_attention_heads": 4,
                "num_heads": 3,
                "head_dim": 32,
                "state_size": 5,
                "n_groups": 1,
                "use_bias": True,
                "use_conv_bias": False,
            },
        },
    ),
    Family(
        "bamba",
        "Bamba",
        {**BAMBA_DEFAULTS, "attn_layer_indices": None, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        {**BAMBA_KEYS, "attn_layer_indices": list_of(integer()) | NULL},
        _bamba,
        names=BAMBA_NAMES,
        goldens={"bamba": {**TINY_STATE, "attn_layer_indices": [1]}},
    ),
)
