"""Arcee (AFM): Llama with feed-forward networks without a gate."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import Family, GGUFLayout

FAMILIES = (
    Family(
        "arcee",
        "Arcee",
        {"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        refine=lambda raw, base: replace(base, gated_mlp=False),
        gguf=(GGUFLayout("arcee", interleaved=True, read=lambda meta, config: {"hidden_act": "relu2"}),),
        goldens={"arcee": {"attention_bias": True, "mlp_bias": True}},
    ),
)
