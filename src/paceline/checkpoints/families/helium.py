"""Helium: Llama with interleaved rotary pairs."""

from __future__ import annotations

from paceline.checkpoints.family import Family

FAMILIES = (
    Family(
        "helium",
        "Helium",
        {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
        interleaved=True,
        goldens={"helium": {"head_dim": 8, "attention_bias": True}},
    ),
)
