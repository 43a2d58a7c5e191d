"""Families that differ from Llama in norms, rotation and windows alone; see `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.files.schema import NULL, FieldKind, whole
from paceline.models.attending import layer_windows, layered
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.layer_types import SLIDING
from paceline.models.rope import read_rope

Raw = Mapping[str, Any]


def _olmo(raw: Raw, base: ModelConfig) -> ModelConfig:
    """OLMo 2: norms after attention and feed-forward alone, and over all query or key heads together."""
    return replace(base, prenorm=False, sandwich=True, qk_norm=True, wide_norm=True)


def _olmo3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """OLMo 3: also windows, in three layers of four; positions are not stretched there."""
    own = (raw.get("rope_parameters") or {}).get(SLIDING)
    local = read_rope(own, raw, raw.get("rope_theta", base.rope.theta), base.head_dim)
    return _olmo(raw, sliding(raw, base, 4, local, base.rope))


def _exaone4(raw: Raw, base: ModelConfig) -> ModelConfig:
    """EXAONE 4: norms after attention and feed-forward alone; where some layers slide, the others encode no
    positions."""
    base = replace(base, prenorm=False, sandwich=True, qk_norm=True)
    every = raw["sliding_window_pattern"]
    # A config without a window may hold the default of one.
    if raw["sliding_window"] is None or not every:
        return base
    return sliding(raw, base, every, base.rope, None)


def _glm4(raw: Raw, base: ModelConfig) -> ModelConfig:
    """GLM-4 of 2025: norms before and after."""
    return replace(base, paired=True, sandwich=True)


def sliding(raw: Raw, base: ModelConfig, every: int, near: RopeConfig | None, far: RopeConfig | None) -> ModelConfig:
    """With windows by `layer_types`, or in all layers but each `every`-th. `near`, `far`: the rotary embeddings of
    layers with and without a window."""
    windows = layer_windows(raw, base, raw["sliding_window"], lambda i: (i + 1) % every != 0)
    return layered(base, windows, [near if window else far for window in windows])


_GLM = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
Refine = Callable[[Raw, ModelConfig], ModelConfig]

VARIANTS: dict[str, tuple[Refine, Raw, Mapping[str, FieldKind]]] = {
    "olmo2": (_olmo, {"rms_norm_eps": 1e-5}, {}),
    "olmo3": (_olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None}, {}),
    "exaone4": (
        _exaone4,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        {"sliding_window_pattern": whole() | NULL},
    ),
    "glm": (lambda raw, base: replace(base, paired=True), _GLM, {}),
    "glm4": (_glm4, _GLM, {}),
    "ernie4_5": (
        lambda raw, base: replace(base, paired=True),
        {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {},
    ),
    "qwen3_vl_text": (lambda raw, base: replace(base, qk_norm=True), {"head_dim": 128, "rope_theta": 5000000.0}, {}),
}
"""By model_type: what `families.Family` is made of."""
