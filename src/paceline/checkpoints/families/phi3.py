"""Phi-3 and Phi-4: Llama with fused projections, sliding windows, partial rotary embeddings, and other rotary factors
for long prompts."""

from __future__ import annotations

from paceline.checkpoints.family import LAYER, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, rotated_share
from paceline.checkpoints.layer_plans import windows_everywhere


def _rope(scaling: Raw) -> Raw:
    """Replace the older names of the rope scaling type longrope."""
    old = scaling.get("rope_type", scaling.get("type")) in ("su", "yarn")
    return {**scaling, "rope_type": "longrope"} if old else scaling


def _read(meta: Metadata, config: Config) -> Config:
    original = meta.get("rope.scaling.original_context_length")
    return {"original_max_position_embeddings": original, **rotated_share(meta, config)}


_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 5.0, 12.0]}

FAMILIES = (
    Family(
        "phi3",
        "Phi-3, Phi-4, Phi-4-mini",
        {
            "sliding_window": None,
            "partial_rotary_factor": None,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        refine=windows_everywhere,
        rope=_rope,
        gguf=(
            GGUFLayout(
                "phi3",
                {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
                read=_read,
                strips_spaces=True,
            ),
        ),
        goldens={
            "phi3, sliding": {"sliding_window": 17},
            "phi3, partial, short factors": {
                "head_dim": 12,
                "num_attention_heads": 4,
                "partial_rotary_factor": 0.7,
                "rope_parameters": _LONGROPE,
                "original_max_position_embeddings": 1800,
            },
            "phi3, long factors": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 30},
        },
    ),
)
