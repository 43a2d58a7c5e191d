"""EXAONE 4: norms after attention and after the feed-forward block. If some layers have a sliding window, the other
layers encode no positions."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.family import LAYER, POST_NORMS, QK_NORMS, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, layer_types
from paceline.checkpoints.layer_plans import SLIDING, windows_except_every
from paceline.files.schema import NULL, integer
from paceline.models.config import ModelConfig, NormConfig


def _exaone4(raw: Raw, base: ModelConfig) -> ModelConfig:
    base = replace(base, norms=NormConfig(base.norms.eps, before=False, after=True, heads="shared"))
    every = raw["sliding_window_pattern"]
    # A config may contain the default window even if the model does not use it.
    if raw["sliding_window"] is None or not every:
        return base
    return windows_except_every(raw, base, every, base.rope, None)


def _read(meta: Metadata, config: Config) -> Config:
    types = layer_types(meta, config["num_hidden_layers"], 4 if config["sliding_window"] else 1)
    return {"layer_types": types, "sliding_window_pattern": 4 if SLIDING in types else 0}


FAMILIES = (
    Family(
        "exaone4",
        "EXAONE 4",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        {"sliding_window_pattern": integer() | NULL},
        _exaone4,
        gguf=(GGUFLayout("exaone4", {**LAYER, **POST_NORMS, **QK_NORMS}, read=_read),),
        goldens={
            "exaone4": {"sliding_window": None, "head_dim": 16, "layer_types": ["full_attention"] * 4},
            "exaone4, sliding": {"sliding_window": 18, "sliding_window_pattern": 2, "head_dim": 16},
        },
    ),
)
