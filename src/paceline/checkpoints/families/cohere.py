"""Command R (Cohere), and Command R7B and A (Cohere 2).

They have layer norms, parallel attention and feed-forward blocks, a scaling factor for the logits, and interleaved
rotary pairs. The largest models have QK-norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.checkpoints.family import LAYER, QK_NORMS, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, has_part, layer_types
from paceline.checkpoints.layer_plans import windows_except_every
from paceline.files.schema import EPS, FACTOR, FLAG, NULL, TOKENS, integer
from paceline.models.config import ModelConfig, NormConfig


def _command(raw: Raw, base: ModelConfig) -> ModelConfig:
    norms = NormConfig(raw["layer_norm_eps"], "layer", shared=True, heads="own" if raw["use_qk_norm"] else None)
    return replace(base, parallel=True, norms=norms, logits_divisor=1 / raw["logit_scale"])


def _cohere(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Use the longer context, because older models were trained for more than `max_position_embeddings`."""
    return _command(raw, replace(base, context_length=max(base.context_length, raw["model_max_length"] or 0)))


def _cohere2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add windows to three layers out of four. Only these layers encode positions."""
    return _command(raw, windows_except_every(raw, base, raw["sliding_window_pattern"], base.rope, None))


def _factors(meta: Metadata, config: Config) -> Config:
    return {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": meta.get("logit_scale", 0.0) or 1.0}


def _read(meta: Metadata, config: Config) -> Config:
    return {**_factors(meta, config), "use_qk_norm": has_part(meta, "attn_q_norm")}


def _read2(meta: Metadata, config: Config) -> Config:
    return {**_factors(meta, config), "layer_types": layer_types(meta, config["num_hidden_layers"], 4)}


_NAMES = {**LAYER, **QK_NORMS}
_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
    "model_max_length": None,
    "tie_word_embeddings": True,
}
_KEYS = {
    "layer_norm_eps": EPS,
    "logit_scale": FACTOR,
    "use_qk_norm": FLAG | NULL,
    "model_max_length": TOKENS | NULL,
    "sliding_window_pattern": integer(1),
}

FAMILIES = (
    Family(
        "cohere",
        "Command R (Cohere)",
        {**_DEFAULTS, "rope_theta": 500000.0},
        _KEYS,
        _cohere,
        interleaved=True,
        gguf=(GGUFLayout("command-r", _NAMES, read=_read),),
        goldens={
            "cohere": {"logit_scale": 0.3},
            "cohere, norms of heads": {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True},
        },
    ),
    Family(
        "cohere2",
        "Command R7B, A (Cohere 2)",
        {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        _KEYS,
        _cohere2,
        interleaved=True,
        gguf=(GGUFLayout("cohere2", _NAMES, read=_read2),),
        goldens={"cohere2, sliding": {"logit_scale": 0.3, "sliding_window": 18}},
    ),
)
