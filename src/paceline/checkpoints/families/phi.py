"""Phi-1 and 2: layer norms, parallel attention and feed-forward blocks, and feed-forward networks without a gate."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, rotated_share
from paceline.files.schema import EPS, FLAG, NULL
from paceline.models.config import ModelConfig, NormConfig


def _phi(raw: Raw, base: ModelConfig) -> ModelConfig:
    norms = NormConfig(raw["layer_norm_eps"], "layer", shared=True, heads="shared" if raw["qk_layernorm"] else None)
    return replace(base, parallel=True, gated_mlp=False, norms=norms)


def _read(meta: Metadata, config: Config) -> Config:
    own = {"layer_norm_eps": config["rms_norm_eps"], "hidden_act": "gelu_new"}
    return {**own, **rotated_share(meta, config)}


FAMILIES = (
    Family(
        "phi",
        "Phi-1, Phi-2",
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": False},
        {"layer_norm_eps": EPS, "qk_layernorm": FLAG | NULL},
        _phi,
        names={
            "model.final_layernorm.": "model.norm.",
            ".self_attn.dense.": ".self_attn.o_proj.",
            **{f".{x}_layernorm.": f".{x}_norm." for x in "qk"},
            ".mlp.fc1.": ".mlp.up_proj.",
            ".mlp.fc2.": ".mlp.down_proj.",
        },
        gguf=(GGUFLayout("phi2", {**LAYER, "attn_qkv": "self_attn.qkv_proj"}, read=_read),),
        goldens={
            "phi": {"hidden_size": 96, "num_attention_heads": 4},
            "phi, norms of heads": {"qk_layernorm": True},
        },
    ),
)
