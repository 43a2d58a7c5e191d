"""The native decoder's config, read from a checkpoint's config.json (or from GGUF metadata that were translated to its
keys)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoints.family import Family, Raw
from paceline.checkpoints.registry import FAMILIES, ties_head
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import DECODER, FIX_INVALID_FILE, LAYERS, MAX_ROWS, check
from paceline.kernels.activations import ACTIVATIONS, UNGATED
from paceline.models.config import MatrixConfig, ModelConfig, NormConfig, RopeConfig
from paceline.models.refusals import refuse_other_kinds
from paceline.models.rope import read_rope, scaling_of

COMPUTATION_KEYS = (
    *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("partial_rotary_factor", "no_rope_layers", "use_bidirectional_attention", "attention_chunk_size", "clip_qkv"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
)
"""Keys that change the computation, but not the tensors. If a family has no default for such a key, it rejects configs
that set it."""


def read_config(raw: Raw, where: str | Path = "config.json") -> ModelConfig:
    """Read the config of a native decoder.

    Args:
        raw: Contents of config.json.
        where: Name of the config in error messages.

    Raises:
        UnsupportedModel: If the native decoder cannot run the model.
        CorruptModel: If a key is missing, out of range (see `schema.py`) or inconsistent with other keys.
    """
    refuse_other_kinds(raw, where, FAMILIES)
    name = raw["model_type"]
    if name not in FAMILIES:
        raise UnsupportedModel(f"model type {name!r} is not supported", f"Paceline runs {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[name]
    raw = {**family.defaults, **raw}
    check(where, raw, {**DECODER, **family.keys})
    _refuse_unsupported_keys(raw, family)
    try:
        config = family.refine(raw, _common(raw, family))
    except KeyError as missing:
        raise CorruptModel(f"{where} of a {name} model lacks {missing}", FIX_INVALID_FILE) from missing
    _check(config)
    return config


def _common(raw: Raw, family: Family) -> ModelConfig:
    """Return the part of the config that all families share."""
    heads = raw["num_attention_heads"]
    head_dim = raw.get(family.rotary_key) or raw["hidden_size"] // heads
    rope = read_rope(family.rope(scaling_of(raw)), raw, raw.get("rope_theta", 10000.0), head_dim)
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
        norms=NormConfig(raw.get("rms_norm_eps", 1e-6)),
        activation=raw.get("hidden_act", "silu"),
        tied=ties_head(raw),
        rope=replace(rope, interleaved=family.interleaved),
    )


def _layers(raw: Raw) -> int:
    """Return the number of layers. transformers omits it from configs that list the types of layers (Nemotron-H)."""
    names = raw.get("layers_block_type")
    count = raw["num_hidden_layers"] if "num_hidden_layers" in raw or not names else len(names)
    if not 0 < count <= LAYERS:
        raise CorruptModel(f"num_hidden_layers must be from 1 to {LAYERS}, got {count}", FIX_INVALID_FILE)
    return int(count)


def _context(raw: Raw, rope: RopeConfig) -> int:
    """Return the context length. With dynamic and yarn scaling, `max_position_embeddings` may be the trained length."""
    length: int = raw.get("max_position_embeddings", 2048)
    if rope.kind not in ("dynamic", "yarn"):
        return length
    numbers = dict(rope.scaling)
    return max(length, int(numbers["factor"] * numbers["original_max_position_embeddings"]))


def _check(c: ModelConfig) -> None:
    """Raise an error if fields contradict each other."""
    if c.mixture and not 0 < c.mixture.used <= c.mixture.count:
        raise CorruptModel(
            f"experts per token must be from 1 to the number of experts, {c.mixture.count}, got {c.mixture.used}",
            FIX_INVALID_FILE,
        )
    known = ACTIVATIONS if c.gated_mlp else UNGATED
    if c.activation not in known:
        raise UnsupportedModel(f"activation {c.activation!r} is not known", f"Known: {', '.join(known)}")
    if c.heads % c.kv_heads or c.head_dim < 2 or c.head_dim % 2:
        raise CorruptModel(
            f"{c.heads} heads of size {c.head_dim} do not fit {c.kv_heads} key heads, or the size is odd",
            FIX_INVALID_FILE,
        )
    for one in {layer.recurrent for layer in c.plan if layer.recurrent}:
        uneven = isinstance(one, MatrixConfig) and one.heads % one.key_heads
        if uneven or one.state_size > MAX_ROWS:
            raise CorruptModel(f"{one} does not fit: its state has {one.state_size:,} numbers", FIX_INVALID_FILE)
    if any(c.heads % own.kv_heads or own.head_dim < 2 or own.head_dim % 2 for own in map(c.of, c.plan)):
        raise CorruptModel(
            f"{c.heads} heads do not fit the key heads of every layer, or a size is odd", FIX_INVALID_FILE
        )
    widest = max(own.head_dim for own in map(c.of, c.plan))
    if c.heads * widest > MAX_ROWS or c.layers * c.token_inputs > MAX_ROWS:
        raise CorruptModel(
            f"{c.heads} heads of size {widest} exceed the maximum of {MAX_ROWS:,} rows", FIX_INVALID_FILE
        )


def _refuse_unsupported_keys(raw: Raw, family: Family) -> None:
    """Raise `UnsupportedModel` for keys that the family would otherwise ignore."""
    strange = [key for key in COMPUTATION_KEYS if key not in family.defaults and _has_effect(raw.get(key))]
    if "partial_rotary_factor" not in family.defaults and _has_effect(scaling_of(raw).get("partial_rotary_factor")):
        strange.append("partial_rotary_factor")
    if "layer_types" not in family.defaults and len(set(raw.get("layer_types") or ())) > 1:
        strange.append("layer_types")
    if raw.get("use_sliding_window") is False and "sliding_window" in strange:
        strange.remove("sliding_window")
    if strange:
        raise UnsupportedModel(
            f"a {raw['model_type']} model with {', '.join(strange)} is not supported",
            "This variant of the architecture is not implemented. Use another model",
        )


def _has_effect(value: Any) -> bool:
    """Return True unless a key is absent, false, a factor of 1, or the same for all layers."""
    if isinstance(value, list):
        return not all(value)
    return value is not None and value is not False and (value != 1 or value is True)
