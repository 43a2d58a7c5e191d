"""The decoder families, read from Hugging Face configs (GGUF metadata is translated to them).

To add one: an entry in `FAMILIES`, what its keys mean in `attending.py`, `variants.py`, `layer_normed.py`,
`mixtures.py`, `deepseek.py`, `hybrids.py` or `mamba_hybrids.py`, and in `decoder.py` any part that no other family has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import (
    CORRECT,
    DECODER,
    GEMMA,
    GEMMA4,
    GRANITE,
    GROUPED,
    HYBRID,
    LATENT,
    LAYER_NORM,
    LAYERS,
    LLAMA4,
    MAMBA,
    MIXTURE,
    MOST_ROWS,
    OBJECT,
    QWEN,
    SHORT_CONV,
    SMOLLM3,
    FieldKind,
    check,
    check_value,
)
from paceline.kernels.activations import ACTIVATIONS, LIMIT, SLOPE, UNGATED
from paceline.models import gemma4, mixtures
from paceline.models.attending import (
    gemma,
    gemma1,
    gemma3,
    gpt_oss,
    granite,
    mixtral,
    qwen,
    qwen3_moe,
    smollm3,
    windows_by_type,
    windows_everywhere,
)
from paceline.models.config import MatrixConfig, ModelConfig, RopeConfig
from paceline.models.deepseek import DEEPSEEK, deepseek
from paceline.models.hybrids import LFM2, LFM2_EXPERTS, NEXT, NEXT_EXPERTS, TEXT_PARTS, lfm2, qwen3_next
from paceline.models.layer_normed import LAYER_NORMED
from paceline.models.layer_types import SLIDING
from paceline.models.mamba_hybrids import MAMBA_FAMILIES
from paceline.models.refusals import refuse_other_kinds
from paceline.models.rope import read_rope
from paceline.models.variants import VARIANTS

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
    "mistral": Family(windows_everywhere, {"sliding_window": 4096}),
    "ministral": Family(windows_by_type, {"sliding_window": None, "layer_types": None}),
    "qwen2": Family(qwen, _QWEN, QWEN),
    "mimo": Family(qwen, _QWEN, QWEN),
    "qwen3": Family(qwen, _QWEN | {"head_dim": 128}, QWEN),
    "phi3": Family(
        windows_everywhere,
        {
            "sliding_window": None,
            "partial_rotary_factor": None,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "smollm3": Family(
        smollm3,
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
        granite,
        {
            **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), 1.0),
            "logits_scaling": 1.0,
        },
        GRANITE,
    ),
    "gemma": Family(gemma1, {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": Family(
        partial(gemma, every=2), _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, GEMMA
    ),
    "gemma3_text": Family(
        gemma3,
        _GEMMA | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        GEMMA,
    ),
    "gemma4_text": Family(gemma4.gemma4, gemma4.GEMMA4, GEMMA4),
    "mixtral": Family(
        mixtral,
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
        gpt_oss,
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
        qwen3_moe,
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
    **{name: Family(*parts) for name, parts in VARIANTS.items()},
    **{name: Family(deepseek, defaults, LATENT) for name, defaults in DEEPSEEK.items()},
    **{name: Family(*parts, LAYER_NORM) for name, parts in LAYER_NORMED.items()},
    "llama4_text": Family(mixtures.llama4, mixtures.LLAMA4, LLAMA4),
    "glm4_moe": Family(mixtures.glm4_moe, mixtures.GLM4_MOE, GROUPED),
    "lfm2": Family(lfm2, LFM2, SHORT_CONV),
    "lfm2_moe": Family(lfm2, LFM2 | LFM2_EXPERTS, {**SHORT_CONV, **MIXTURE}),
    **{name: Family(*parts, MAMBA) for name, parts in MAMBA_FAMILIES.items()},
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
    rotary = raw["qk_rope_head_dim"] if raw["model_type"] in DEEPSEEK else None
    head_dim = rotary or raw.get("head_dim") or raw["hidden_size"] // heads
    rope = _rope(raw, head_dim)
    return ModelConfig(
        family=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=_layers(raw),
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


def _layers(raw: Raw) -> int:
    """The number of layers, which transformers leaves out where they are named (Nemotron-H)."""
    names = raw.get("layers_block_type")
    count = raw["num_hidden_layers"] if "num_hidden_layers" in raw or not names else len(names)
    if not 0 < count <= LAYERS:
        raise CorruptModel(f"a model of {count} layers cannot be", CORRECT)
    return int(count)


def _rope(raw: Raw, head_dim: int) -> RopeConfig:
    """From either `rope_theta` + `rope_scaling` or transformers 5's `rope_parameters`, by layer type or not."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw["model_type"] == "gemma4_text":
        scaling = scaling.get(SLIDING) or {}
        check_value("config.json", f"rope_parameters.{SLIDING}", scaling, OBJECT)
    if raw["model_type"] in ("gemma3_text", "olmo3"):
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
    if c.experts and not 0 < c.experts.used <= c.experts.count:
        raise CorruptModel(f"{c.experts.used} of {c.experts.count} experts cannot be used", CORRECT)
    known = UNGATED if c.plain_mlp else ACTIVATIONS
    if c.activation not in known:
        raise UnsupportedModel(f"activation {c.activation!r} is not known", f"Known: {', '.join(known)}")
    if c.heads % c.kv_heads or c.head_dim < 2 or c.head_dim % 2:
        raise CorruptModel(f"{c.heads} heads of size {c.head_dim} over {c.kv_heads} key heads do not fit", CORRECT)
    for one in {layer.recurrent for layer in c.plan if layer.recurrent}:
        uneven = isinstance(one, MatrixConfig) and one.heads % one.key_heads
        if uneven or one.state_size > MOST_ROWS:
            raise CorruptModel(f"{one} does not fit: its state has {one.state_size:,} numbers", CORRECT)
    if any(c.heads % own.kv_heads or own.head_dim < 2 or own.head_dim % 2 for own in map(c.of, c.plan)):
        raise CorruptModel(f"{c.heads} heads do not fit the key heads of every layer", CORRECT)
    widest = max(own.head_dim for own in map(c.of, c.plan))
    if c.heads * widest > MOST_ROWS or c.layers * c.token_inputs > MOST_ROWS:
        raise CorruptModel(f"{c.heads} heads of size {widest} are more than a matrix can have", CORRECT)


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
