"""ERNIE 4.5, dense: Llama with interleaved rotary pairs."""

from __future__ import annotations

from paceline.checkpoints.family import Family, GGUFLayout

FAMILIES = (
    Family(
        "ernie4_5",
        "ERNIE 4.5",
        {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        interleaved=True,
        gguf=(GGUFLayout("ernie4_5"),),
        goldens={"ernie4.5": {"head_dim": 16, "use_bias": True}},
    ),
)
