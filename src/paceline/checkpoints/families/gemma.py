"""Gemma 1 to 3: norm weights that are stored minus 1, norms after each block, sliding windows, and softcaps."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.families.qwen import LANGUAGE
from paceline.checkpoints.family import LAYER, POST_NORMS, QK_NORMS, Family, GGUFLayout, Raw
from paceline.checkpoints.gguf_metadata import Config, Metadata, layer_types
from paceline.checkpoints.layer_plans import FULL, SLIDING, windows_except_every
from paceline.files.schema import BASE, FACTOR, TEXT, integer
from paceline.models.config import AttentionConfig, ModelConfig, NormConfig, RopeConfig
from paceline.models.rope import read_rope


def _gemma(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Build Gemma 1. The config may say "gelu", but the models were trained with "gelu_pytorch_tanh"."""
    return replace(
        base, norms=NormConfig(base.norms.eps, offset=1.0), embed_scale=base.hidden**0.5, activation="gelu_pytorch_tanh"
    )


def _gemma2(raw: Raw, base: ModelConfig, every: int = 2, local: RopeConfig | None = None) -> ModelConfig:
    """Build Gemma 2: norms before and after each block, and sliding windows.

    Args:
        raw: The config.
        base: The common part.
        every: Period of the layers with full attention. The other layers have a sliding window.
        local: The rotary embedding of layers with a sliding window. None if they use the model's.
    """
    base = replace(
        base,
        norms=NormConfig(base.norms.eps, offset=1.0, after=True),
        embed_scale=base.hidden**0.5,
        attention=AttentionConfig(
            scale=raw["query_pre_attn_scalar"] ** -0.5, softcap=raw.get("attn_logit_softcapping")
        ),
        final_softcap=raw.get("final_logit_softcapping"),
        activation=raw["hidden_activation"],
    )
    return windows_except_every(raw, base, every, local or base.rope, base.rope)


def _gemma3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Build Gemma 3: Gemma 2 with QK-norm, and another rotary base in layers with a sliding window."""
    own = (raw.get("rope_parameters") or {}).get(SLIDING)
    local = read_rope(own, raw, raw["rope_local_base_freq"], base.head_dim)
    base = _gemma2(raw, base, raw["sliding_window_pattern"], local)
    return replace(base, norms=replace(base.norms, heads="shared"))


def rope_of_full_layers(scaling: Raw) -> Raw:
    """Return the rope scaling of layers without a window, if the config has a scaling for each layer type."""
    return scaling.get(FULL, {} if SLIDING in scaling else scaling) or {}


def _read2(meta: Metadata, config: Config) -> Config:
    return {
        "sliding_window": meta.get("attention.sliding_window"),
        "layer_types": layer_types(meta, config["num_hidden_layers"], 2),
        "query_pre_attn_scalar": _query_scalar(config, 46),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _read3(meta: Metadata, config: Config) -> Config:
    return {
        "rope_theta": meta.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.get("rope.freq_base_swa"),
        "layer_types": layer_types(meta, config["num_hidden_layers"], 6 if config["sliding_window"] else 1),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _query_scalar(config: Config, layers_of_27b: int) -> int:
    """Return the size that scales the queries: the head size, or another size for the 27B models. As in llama.cpp, the
    number of layers identifies these models.

    The metadata has no key for this size.
    """
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


_KEYS = {
    "hidden_activation": TEXT,
    "query_pre_attn_scalar": FACTOR,
    "rope_local_base_freq": BASE,
    "sliding_window_pattern": integer(1),
}
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
_TINY = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}

FAMILIES = (
    Family(
        "gemma",
        "Gemma 1",
        {"head_dim": 256, "tie_word_embeddings": True},
        refine=_gemma,
        gguf=(
            GGUFLayout("gemma", norms_include_one=True, read=lambda meta, config: {"hidden_act": "gelu_pytorch_tanh"}),
        ),
        goldens={"gemma": {"head_dim": 16}},
    ),
    Family(
        "gemma2",
        "Gemma 2",
        {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _KEYS,
        _gemma2,
        gguf=(GGUFLayout("gemma2", {**LAYER, **POST_NORMS}, norms_include_one=True, read=_read2),),
        goldens={
            "gemma2": {**_TINY, "num_hidden_layers": 2, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0}
        },
    ),
    Family(
        "gemma3_text",
        "Gemma 3 (text)",
        {**_DEFAULTS, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        _KEYS,
        _gemma3,
        rope_of_full_layers,
        names={"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", **LANGUAGE},
        part_of=("gemma3",),
        gguf=(GGUFLayout("gemma3", {**LAYER, **POST_NORMS, **QK_NORMS}, norms_include_one=True, read=_read3),),
        goldens={
            "gemma3": {**_TINY, "layer_types": [SLIDING, FULL] * 2},
            "gemma3, stretched": {
                **_TINY,
                "layer_types": [SLIDING] * 3 + [FULL],
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        },
    ),
)
