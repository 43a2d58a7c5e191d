"""Tiny models of every family, from the goldens in the family's file. All tests use this table."""

from __future__ import annotations

from typing import Any

from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.registry import FAMILIES as _FAMILIES
from paceline.models.config import ModelConfig

VOCAB = 101

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

CASES: dict[str, dict[str, Any]] = {
    case: {**SIZES, **changes, "model_type": family.name}
    for family in _FAMILIES.values()
    for case, changes in family.goldens.items()
}
"""Full config of every tiny model."""

_CONFIGS: dict[str, ModelConfig] = {case: read_config(config) for case, config in CASES.items()}
HYBRIDS = [case for case, config in _CONFIGS.items() if config.state_bytes]
GEMMA4 = [case for case, config in _CONFIGS.items() if config.family == "gemma4_text"]
FAMILIES = [case for case in CASES if case not in (*HYBRIDS, *GEMMA4, "dynamic")]
"""Without "dynamic", whose rotary base depends on the length of the prompt."""
WINDOWED = [case for case in FAMILIES if any(layer.window for layer in _CONFIGS[case].plan)]
