"""gpt-oss: every other layer has a sliding window, attention has sinks, and all layers are mixtures of experts with a
clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.expert_tensors import ExpertTensors
from paceline.checkpoints.family import LAYER, MIXTURE_KEYS, Family, GGUFLayout, Raw, experts_named
from paceline.checkpoints.gguf_metadata import Config, Metadata, layer_types
from paceline.checkpoints.layer_plans import layer_windows, with_layers
from paceline.errors import UnsupportedModel
from paceline.files.schema import FACTOR
from paceline.kernels.activations import LIMIT, SLOPE
from paceline.models.config import AttentionConfig, MixtureConfig, ModelConfig


def _gpt_oss(raw: Raw, base: ModelConfig) -> ModelConfig:
    if (given := (raw["swiglu_alpha"], raw["swiglu_limit"])) != (SLOPE, LIMIT):
        raise UnsupportedModel(
            f"swiglu_alpha and swiglu_limit {given} are not supported", f"OpenAI's models have {SLOPE} and {LIMIT}"
        )
    experts = MixtureConfig(
        raw["num_local_experts"], raw["num_experts_per_tok"], base.ffn, normalised=True, router="router"
    )
    base = replace(base, mixture=experts, activation="clamped_swiglu", attention=AttentionConfig(sinks=True))
    windows = layer_windows(raw, base, raw["sliding_window"], lambda i: i % 2 == 0)
    return with_layers(base, windows, sparse=[True] * base.layers)


def _read(meta: Metadata, config: Config) -> Config:
    """Read the experts and windows. The models were trained with a YaRN that does not round its rotary planes. No
    metadata key records this."""
    rope = {**config["rope_scaling"], "truncate": False} if config["rope_scaling"] else {"rope_type": "default"}
    return {
        "num_local_experts": meta["expert_count"],
        "num_experts_per_tok": meta["expert_used_count"],
        "intermediate_size": meta["expert_feed_forward_length"],
        "layer_types": layer_types(meta, config["num_hidden_layers"], 2),
        "rope_scaling": rope,
    }


_GGUF = GGUFLayout(
    "gpt-oss",
    {
        **LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    experts_named("mlp.experts"),
    read=_read,
)
_TINY = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}

FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss",
        {
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "swiglu_alpha": SLOPE,
            "swiglu_limit": LIMIT,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {**MIXTURE_KEYS, **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), FACTOR)},
        _gpt_oss,
        tensors=lambda raw, tensors: ExpertTensors(tensors),
        quantised=("mxfp4",),
        gguf=(_GGUF,),
        goldens={
            "gpt-oss": {**_TINY, "sliding_window": 18},
            "gpt-oss, other layers slide": {
                **_TINY,
                "sliding_window": 21,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
        },
    ),
)
