"""GPT-NeoX and Pythia: layer norms, and parallel attention and feed-forward blocks, each with its own norm."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, rotated_share
from paceline.files.schema import BASE, EPS, FLAG, NULL, SHARE
from paceline.models.config import ModelConfig, NormConfig
from paceline.models.rope import read_rope, scaling_of


def _neox(raw: Raw, base: ModelConfig) -> ModelConfig:
    share = raw["rotary_pct"] if raw["partial_rotary_factor"] is None else raw["partial_rotary_factor"]
    own = {**raw, "partial_rotary_factor": share}
    rope = read_rope(scaling_of(raw), own, raw["rotary_emb_base"], base.head_dim)
    norms, parallel = NormConfig(raw["layer_norm_eps"], "layer"), bool(raw["use_parallel_residual"])
    return replace(base, rope=rope, kv_heads=base.heads, gated_mlp=False, parallel=parallel, norms=norms)


def _read(meta: Metadata, config: Config) -> Config:
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "hidden_act": "gelu",
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": meta["use_parallel_residual"],
        **rotated_share(meta, config),
    }


FAMILIES = (
    Family(
        "gpt_neox",
        "GPT-NeoX, Pythia",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "partial_rotary_factor": None,
        },
        {"layer_norm_eps": EPS, "use_parallel_residual": FLAG | NULL, "rotary_pct": SHARE, "rotary_emb_base": BASE},
        _neox,
        names={
            "gpt_neox.": "model.",
            "embed_out.": "lm_head.",
            "model.embed_in.": "model.embed_tokens.",
            "model.final_layer_norm.": "model.norm.",
            ".attention.": ".self_attn.",
            ".self_attn.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
        gguf=(
            GGUFLayout(
                "gptneox",
                {**LAYER, "attn_qkv": "self_attn.qkv_proj"},
                read=_read,
                keys={"use_parallel_residual": FLAG},
            ),
        ),
        goldens={
            "gpt-neox": {"hidden_size": 96, "num_attention_heads": 4, "rotary_pct": 0.5},
            "gpt-neox, one after the other": {"rotary_pct": 0.75, "use_parallel_residual": False},
        },
    ),
)
