"""Families whose norms subtract the mean, most of them with attention and feed-forward side by side; see
`families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.models.attending import windows_everywhere
from paceline.models.config import ModelConfig
from paceline.models.rope import read_rope
from paceline.models.variants import sliding

Raw = Mapping[str, Any]


def _cohere(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Command R. The older models are trained for longer texts than `max_position_embeddings`."""
    return _command(raw, replace(base, context_length=max(base.context_length, raw["model_max_length"] or 0)))


def _command(raw: Raw, base: ModelConfig) -> ModelConfig:
    """A factor of the logits, rotary pairs side by side, and in the largest norms of queries and keys."""
    return replace(
        _parallel(raw, base),
        logits_divisor=1 / raw["logit_scale"],
        paired=True,
        qk_norm=bool(raw["use_qk_norm"]),
        own_head_norms=True,
    )


def _cohere2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Command R7B and A: windows in three layers of four, and positions only there."""
    return _command(raw, sliding(raw, base, raw["sliding_window_pattern"], base.rope, None))


def _starcoder2(raw: Raw, base: ModelConfig) -> ModelConfig:
    """StarCoder 2: biases, which the tensors tell, and feed-forward networks without a gate, one after the other."""
    base = windows_everywhere(raw, base)
    return replace(base, layer_norm=True, norm_eps=raw["norm_epsilon"], plain_mlp=True)


def _stablelm(raw: Raw, base: ModelConfig) -> ModelConfig:
    """StableLM: in the largest side by side, with norms of queries and keys."""
    base = replace(base, qk_norm=bool(raw["qk_layernorm"]), own_head_norms=True)
    return _parallel(raw, base, parallel=bool(raw["use_parallel_residual"]))


def _phi(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Phi-1 and 2."""
    return replace(_parallel(raw, base), plain_mlp=True, qk_norm=bool(raw["qk_layernorm"]))


def _neox(raw: Raw, base: ModelConfig) -> ModelConfig:
    """GPT-NeoX and Pythia: side by side, but each through a norm of its own."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    share = raw["rotary_pct"] if raw["partial_rotary_factor"] is None else raw["partial_rotary_factor"]
    own = {**raw, "partial_rotary_factor": share}
    base = replace(base, rope=read_rope(scaling, own, raw["rotary_emb_base"], base.head_dim))
    base = replace(base, kv_heads=base.heads, plain_mlp=True)
    return replace(_parallel(raw, base, parallel=bool(raw["use_parallel_residual"])), one_norm=False)


def _parallel(raw: Raw, base: ModelConfig, parallel: bool = True) -> ModelConfig:
    """With layer norms, and with attention and feed-forward side by side behind one of them if `parallel`."""
    return replace(base, layer_norm=True, norm_eps=raw["layer_norm_eps"], parallel=parallel, one_norm=parallel)


_COHERE = {
    **{"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "use_qk_norm": False, "model_max_length": None},
    "tie_word_embeddings": True,
}

LAYER_NORMED: Mapping[str, tuple[Callable[[Raw, ModelConfig], ModelConfig], Raw]] = {
    "cohere": (_cohere, {**_COHERE, "rope_theta": 500000.0}),
    "cohere2": (_cohere2, {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None}),
    "starcoder2": (
        _starcoder2,
        {
            **{"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
            **{"num_key_value_heads": 2, "tie_word_embeddings": True},
        },
    ),
    "stablelm": (
        _stablelm,
        {
            **{"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "num_key_value_heads": 32},
            **{"use_parallel_residual": False, "qk_layernorm": False},
        },
    ),
    "phi": (
        _phi,
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": False},
    ),
    "gpt_neox": (
        _neox,
        {
            **{"layer_norm_eps": 1e-5, "hidden_act": "gelu", "use_parallel_residual": True},
            **{"rotary_pct": 0.25, "rotary_emb_base": 10000, "partial_rotary_factor": None},
        },
    ),
}
"""By model_type: what `families.Family` is made of, but for the kinds of keys."""
