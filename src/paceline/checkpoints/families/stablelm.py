"""StableLM: layer norms.

The largest models also have parallel attention and feed-forward blocks, and QK-norm.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, QK_NORMS, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, has_part, rotated_share
from paceline.files.schema import EPS, FLAG, NULL
from paceline.models.config import ModelConfig, NormConfig


def _stablelm(raw: Raw, base: ModelConfig) -> ModelConfig:
    parallel = bool(raw["use_parallel_residual"])
    norms = NormConfig(raw["layer_norm_eps"], "layer", shared=parallel, heads="own" if raw["qk_layernorm"] else None)
    return replace(base, parallel=parallel, norms=norms)


def _read(meta: Metadata, config: Config) -> Config:
    """Detect parallel blocks from the tensors, as llama.cpp does, because the metadata may be wrong."""
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "use_parallel_residual": not has_part(meta, "ffn_norm"),
        "qk_layernorm": has_part(meta, "attn_q_norm"),
        **rotated_share(meta, config),
    }


FAMILIES = (
    Family(
        "stablelm",
        "StableLM",
        {
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "num_key_value_heads": 32,
            "use_parallel_residual": False,
            "qk_layernorm": False,
        },
        {"layer_norm_eps": EPS, "use_parallel_residual": FLAG | NULL, "qk_layernorm": FLAG | NULL},
        _stablelm,
        names={f".{x}_layernorm.norms.": f".{x}_norm." for x in "qk"},
        gguf=(GGUFLayout("stablelm", {**LAYER, **QK_NORMS}, read=_read),),
        goldens={
            "stablelm": {"use_qkv_bias": True},
            "stablelm, parallel": {"use_parallel_residual": True, "qk_layernorm": True},
        },
    ),
)
