"""The decoder families, read from Hugging Face configs (GGUF metadata is translated to them).

To add one: an entry in `FAMILIES`, and in `decoder.py` any part that no other family has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import (
    CORRECT,
    DECODER,
    GEMMA,
    GRANITE,
    HYBRID,
    MIXTURE,
    MOST_ROWS,
    QWEN,
    SHORT_CONV,
    SMOLLM3,
    FieldKind,
    check,
)
from paceline.kernels.activations import ACTIVATIONS, LIMIT, SLOPE
from paceline.models.config import Experts, LayerConfig, MatrixConfig, ModelConfig, RopeConfig
from paceline.models.hybrids import LFM2, NEXT, NEXT_EXPERTS, TEXT_PARTS, lfm2, qwen3_next
from paceline.models.refusals import refuse_other_kinds
from paceline.models.rope import read_rope

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of one `model_type`.

    `refine`: from the raw config and the part that all families share to the whole. `defaults`: for keys that a config
    may omit; they name all keys of `_PECULIAR` that the family reads. `fields`: the kinds of its own keys.
    """

    refine: Callable[[Raw, ModelConfig], ModelConfig] = lambda raw, base: base
    defaults: Raw = field(default_factory=dict)
    fields: Mapping[str, FieldKind] = field(default_factory=dict)


def _windows_everywhere(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Mistral, Phi-3: every layer has the sliding window."""
    return _layered(base, [raw.get("sliding_window")] * base.layers)


def _windows_by_type(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Ministral: `layer_types` says which layers slide, by default all if there is a window."""
    window = raw.get("sliding_window")
    return _layered(base, _windows(raw, base, window, lambda i: window is not None))


def _qwen(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Qwen2, and Qwen3 with its norms: the upper layers slide, if any."""
    window, first = raw["sliding_window"] if raw["use_sliding_window"] else None, raw["max_window_layers"]
    windows = _windows(raw, base, window, lambda i: window is not None and i >= first)
    return _layered(replace(base, qk_norm=base.family == "qwen3"), windows)


def _qwen3_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    count = raw.get("num_experts", raw.get("num_local_experts", 128))
    experts = Experts(count, raw["num_experts_per_tok"], raw["moe_intermediate_size"], raw["norm_topk_prob"])
    dense = raw.get("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % raw["decoder_sparse_step"] == 0 for i in range(base.layers)]
    return _layered(replace(base, qk_norm=True, experts=experts), [window] * base.layers, sparse=sparse)


def _mixtral(raw: Raw, base: ModelConfig) -> ModelConfig:
    used, names = raw["num_experts_per_tok"], ("w1", "w3", "w2")
    experts = Experts(raw["num_local_experts"], used, base.ffn, True, "block_sparse_moe", names)
    windows = [raw.get("sliding_window")] * base.layers
    return _layered(replace(base, experts=experts), windows, sparse=[True] * base.layers)


def _gpt_oss(raw: Raw, base: ModelConfig) -> ModelConfig:
    """gpt-oss: every other layer slides, attention has sinks, and all layers are mixtures with a clamped SwiGLU."""
    if (given := (raw["swiglu_alpha"], raw["swiglu_limit"])) != (SLOPE, LIMIT):
        raise UnsupportedModel(
            f"swiglu_alpha and swiglu_limit {given} are not supported", f"OpenAI's models have {SLOPE} and {LIMIT}"
        )
    experts = Experts(raw["num_local_experts"], raw["num_experts_per_tok"], base.ffn, True, router="router")
    base = replace(base, experts=experts, activation="clamped_swiglu", sinks=True)
    windows = _windows(raw, base, raw["sliding_window"], lambda i: i % 2 == 0)
    return _layered(base, windows, sparse=[True] * base.layers)


def _granite(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Granite 3: Llama with factors of the embedding, the scores, the layers' outputs and the logits."""
    return replace(
        base,
        embed_scale=raw["embedding_multiplier"],
        query_scale=raw["attention_multiplier"],
        residual_scale=raw["residual_multiplier"],
        logits_divisor=raw["logits_scaling"],
    )


def _gemma1(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Gemma 1, whose config may name its activation "gelu", which was never computed."""
    return replace(base, norm_shift=1.0, embed_scale=base.hidden**0.5, activation="gelu_pytorch_tanh")


def _smollm3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """SmolLM3: every fourth layer encodes no positions, and only such a layer may slide."""
    every = raw["no_rope_layer_interval"]
    rotates = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(base.layers)]
    if len(rotates) < base.layers:
        raise CorruptModel(f"no_rope_layers names {len(rotates)} of {base.layers} layers", CORRECT)
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    windows = _windows(raw, base, window, lambda i: window is not None and not rotates[i])
    return _layered(base, windows, [base.rope if rotates[i] else None for i in range(base.layers)])


def _gemma(raw: Raw, base: ModelConfig, every: int, local: RopeConfig | None = None) -> ModelConfig:
    """Gemma 2 and 3: one layer in `every` sees everything, the others slide; norms before and after each part.
    `local`: the rotary embedding of the layers that slide, if they have another."""
    windows = _windows(raw, base, raw["sliding_window"], lambda i: (i + 1) % every != 0)
    base = replace(
        base,
        sandwich=True,
        norm_shift=1.0,
        embed_scale=base.hidden**0.5,
        query_scale=raw["query_pre_attn_scalar"] ** -0.5,
        softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        activation=raw["hidden_activation"],
    )
    return _layered(base, windows, [local if local and window else base.rope for window in windows])


def _gemma3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Gemma 3: also norms of queries and keys, and another rotary base in the layers that slide."""
    own = (raw.get("rope_parameters") or {}).get("sliding_attention")
    local = read_rope(own, raw, raw["rope_local_base_freq"], base.head_dim)
    return replace(_gemma(raw, base, raw["sliding_window_pattern"], local), qk_norm=True)


def _windows(raw: Raw, base: ModelConfig, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer: by `layer_types`, or if it is missing by `default`."""
    types = raw.get("layer_types") or [_TYPES[default(i)] for i in range(base.layers)]
    if unknown := set(types) - set(_TYPES):
        raise UnsupportedModel(f"layers of type {', '.join(sorted(unknown))} are not supported", "Use another model")
    if len(types) != base.layers:
        raise CorruptModel(f"layer_types names {len(types)} of {base.layers} layers", CORRECT)
    if window is None and _TYPES[True] in types:
        raise CorruptModel("layer_types names layers that slide, and sliding_window no window", CORRECT)
    return [window if kind == _TYPES[True] else None for kind in types]


_TYPES = ("full_attention", "sliding_attention")


def _layered(
    base: ModelConfig,
    windows: Sequence[int | None],
    ropes: Sequence[RopeConfig | None] | None = None,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """The config with these layers. A window as wide as the context is dropped."""
    ropes, sparse = ropes or [base.rope] * base.layers, sparse or [False] * base.layers
    bounded = [w if w and w < base.context_length else None for w in windows]
    return replace(base, special=tuple(map(LayerConfig, ropes, bounded, sparse)))


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(_windows_everywhere, {"sliding_window": 4096}),
    "ministral": Family(_windows_by_type, {"sliding_window": None, "layer_types": None}),
    "qwen2": Family(_qwen, _QWEN, QWEN),
    "qwen3": Family(_qwen, _QWEN | {"head_dim": 128}, QWEN),
    "phi3": Family(
        _windows_everywhere,
        {
            "sliding_window": None,
            "partial_rotary_factor": None,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "smollm3": Family(
        _smollm3,
        {
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        SMOLLM3,
    ),
    "seed_oss": Family(defaults={"head_dim": 128}),
    "granite": Family(
        _granite,
        {
            **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), 1.0),
            "logits_scaling": 1.0,
        },
        GRANITE,
    ),
    "gemma": Family(_gemma1, {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": Family(
        partial(_gemma, every=2), _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, GEMMA
    ),
    "gemma3_text": Family(
        _gemma3,
        _GEMMA | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        GEMMA,
    ),
    "mixtral": Family(
        _mixtral,
        {
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
        },
        MIXTURE,
    ),
    "gpt_oss": Family(
        _gpt_oss,
        {
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
            "swiglu_alpha": SLOPE,
            "swiglu_limit": LIMIT,
        },
        MIXTURE,
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        {
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        MIXTURE,
    ),
    "lfm2": Family(lfm2, LFM2, SHORT_CONV),
    "qwen3_next": Family(qwen3_next, NEXT | NEXT_EXPERTS, HYBRID),
    "qwen3_5_text": Family(qwen3_next, NEXT, HYBRID),
    "qwen3_5_moe_text": Family(
        qwen3_next,
        NEXT | NEXT_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1},
        HYBRID,
    ),
}
"""By model_type. Biases and fused projections need no entry: they are detected in the tensors."""

_PECULIAR = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("partial_rotary_factor", "no_rope_layers", "use_bidirectional_attention", "attention_chunk_size", "clip_qkv"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
)
"""Keys that change the computation but not the tensors: a family refuses those that its defaults do not name."""


def read_config(raw: Raw, where: str | Path = "config.json") -> ModelConfig:
    """The config of a native decoder. `where`: name of the source in error messages.

    Raises `UnsupportedModel` for models that the native decoder does not run, `CorruptModel` for keys that are missing,
    out of range (see `schema.py`) or contradictory.
    """
    refuse_other_kinds(raw, where)
    name = raw["model_type"]
    if name not in FAMILIES:
        raise UnsupportedModel(f"model type {name!r} is not supported", f"Paceline runs {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[name]
    raw = {**family.defaults, **raw}
    check(where, raw, {**DECODER, **family.fields})
    _refuse_peculiar(raw, family)
    try:
        config = family.refine(raw, _common(raw))
    except KeyError as missing:
        raise CorruptModel(f"{where} of a {name} model lacks {missing}", CORRECT) from missing
    _check(config)
    return config


def ties_head(raw: Raw) -> bool:
    """Whether the output head is the embedding, by the config or the family's default."""
    name = raw.get("model_type")
    return bool({**(FAMILIES[name].defaults if name in FAMILIES else {}), **raw}.get("tie_word_embeddings"))


def _common(raw: Raw) -> ModelConfig:
    """The part of the config that all families share."""
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    rope = _rope(raw, head_dim)
    return ModelConfig(
        family=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=raw["intermediate_size"],
        context_length=_context(raw, rope),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        activation=raw.get("hidden_act", "silu"),
        tied=ties_head(raw),
        rope=rope,
    )


def _rope(raw: Raw, head_dim: int) -> RopeConfig:
    """From either `rope_theta` + `rope_scaling` or transformers 5's `rope_parameters`, by layer type or not."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw["model_type"] == "gemma3_text":
        scaling = scaling.get("full_attention", {} if "sliding_attention" in scaling else scaling) or {}
    if raw["model_type"] in TEXT_PARTS.values():
        # Which axis of an image turns a plane: in text all axes have the same position.
        scaling = {key: value for key, value in scaling.items() if key not in ("mrope_section", "mrope_interleaved")}
    if raw["model_type"] == "phi3" and scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
        scaling = {**scaling, "rope_type": "longrope"}  # its older names
    return read_rope(scaling, raw, raw.get("rope_theta", 10000.0), head_dim)


def _context(raw: Raw, rope: RopeConfig) -> int:
    """`max_position_embeddings`, which dynamic and yarn scaling leave at the trained length."""
    length: int = raw.get("max_position_embeddings", 2048)
    if rope.kind not in ("dynamic", "yarn"):
        return length
    numbers = dict(rope.scaling)
    return max(length, int(numbers["factor"] * numbers["original_max_position_embeddings"]))


def _check(c: ModelConfig) -> None:
    """Raise for contradictions between fields."""
    if c.experts and c.experts.used > c.experts.count:
        raise CorruptModel(f"{c.experts.used} of {c.experts.count} experts cannot be used", CORRECT)
    if c.activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {c.activation!r} is not known", f"Known: {', '.join(ACTIVATIONS)}")
    if c.heads % c.kv_heads or c.head_dim < 2 or c.head_dim % 2:
        raise CorruptModel(f"{c.heads} heads of size {c.head_dim} over {c.kv_heads} key heads do not fit", CORRECT)
    for one in {layer.recurrent for layer in c.plan if layer.recurrent}:
        uneven = isinstance(one, MatrixConfig) and one.heads % one.key_heads
        if uneven or one.state_size > MOST_ROWS:
            raise CorruptModel(f"{one} does not fit: its state has {one.state_size:,} numbers", CORRECT)
    if c.heads * c.head_dim > MOST_ROWS:
        raise CorruptModel(f"{c.heads} heads of size {c.head_dim} are more than a matrix can have", CORRECT)


def _refuse_peculiar(raw: Raw, family: Family) -> None:
    """Raise `UnsupportedModel` for keys that the family would silently ignore."""
    strange = [key for key in _PECULIAR if key not in family.defaults and not _idle(raw.get(key))]
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "partial_rotary_factor" not in family.defaults and not _idle(scaling.get("partial_rotary_factor")):
        strange.append("partial_rotary_factor")
    if "layer_types" not in family.defaults and len(set(raw.get("layer_types") or ())) > 1:
        strange.append("layer_types")
    if raw.get("use_sliding_window") is False and "sliding_window" in strange:
        strange.remove("sliding_window")
    if strange:
        raise UnsupportedModel(
            f"a {raw['model_type']} model with {', '.join(strange)} is not supported",
            "It is a variant of the family that computes something else",
        )


def _idle(value: Any) -> bool:
    """Whether a key is off: absent, false, a factor of 1, or the same for all layers."""
    if isinstance(value, list):
        return all(value)
    return value is None or value is False or (value == 1 and value is not True)
