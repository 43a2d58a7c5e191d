"""The types and ranges of the fields in a model's files. There is one table for each kind of file.

All values from JSON or GGUF metadata pass `check` before they are used, so later code can rely on types and sizes. The
upper bounds are far above any published model, but low enough that no single field can exhaust time or memory. Fields
without an entry are not read, or are only compared with known values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, one_line

FIX_INVALID_FILE = "Correct the file or fetch the model again"
"""The advice of errors about an invalid file. Its values may have been edited by hand."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A kind of value.

    Attributes:
        singular: Description of one value, such as "a string".
        accepts: A function that returns True for values of this kind.
        plural: Description of several values, such as "strings".
        python_type: A Python type whose values are all of this kind, or None. With it, a long list is checked by the
            set of its elements' types.
    """

    singular: str
    accepts: Callable[[Any], bool]
    plural: str = ""
    python_type: type | None = None

    def __or__(self, other: FieldKind) -> FieldKind:
        plural = f"{self.plural} or {other.plural}"
        return FieldKind(
            f"{self.singular} or {other.singular}", lambda value: self.accepts(value) or other.accepts(value), plural
        )


def check(where: str | Path, values: Mapping[str, Any], fields: Mapping[str, FieldKind]) -> None:
    """Raise `CorruptModel` for the first field with a value of the wrong kind. Fields may be absent."""
    for name, kind in fields.items():
        if name in values:
            check_value(where, name, values[name], kind)


def check_value(where: str | Path, name: str, value: Any, kind: FieldKind) -> None:
    """Raise `CorruptModel` if the value of a field has the wrong kind."""
    if not kind.accepts(value):
        raise CorruptModel(f"{where}: {name} must be {kind.singular}, got {format_value(value)}", FIX_INVALID_FILE)


def format_value(value: Any) -> str:
    """Format a value for error messages."""
    return one_line("null" if value is None else repr(value), 80)


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def integer(low: int = 0, high: int = 2**31 - 1) -> FieldKind:
    """Return the kind of whole numbers from `low` to `high`, inclusive."""
    bounds = f"from {low} to {high}"
    return FieldKind(
        f"a whole number {bounds}", lambda x: _is_number(x, int) and low <= x <= high, f"whole numbers {bounds}"
    )


def number(low: float, high: float) -> FieldKind:
    """Return the kind of finite numbers from `low` to `high`, inclusive."""

    def accepts(x: Any) -> bool:
        return _is_number(x, (int, float)) and low <= x <= high and math.isfinite(x)

    return FieldKind(f"a number from {low:g} to {high:g}", accepts, f"numbers from {low:g} to {high:g}")


def list_of(kind: FieldKind) -> FieldKind:
    """Return the kind of lists with elements of this kind."""

    def accepts(x: Any) -> bool:
        if not isinstance(x, list):
            return False
        types = set(map(type, x))
        # A vocabulary has hundreds of thousands of tokens, but its list of token types has few distinct numbers.
        return types == {kind.python_type} or all(map(kind.accepts, set(x) if types == {int} else x))

    what = f"of {kind.plural}"
    return FieldKind(f"a list {what}", accepts, f"lists {what}")


def list_of_length(kind: FieldKind, count: int) -> FieldKind:
    """Return the kind of lists with `count` elements of this kind."""
    base = list_of(kind)
    return FieldKind(f"a list of {count} {kind.plural}", lambda x: base.accepts(x) and len(x) == count)


def object_of(kind: FieldKind) -> FieldKind:
    """Return the kind of objects with values of this kind."""

    def accepts(x: Any) -> bool:
        return isinstance(x, dict) and all(map(kind.accepts, x.values()))

    return FieldKind(f"an object of {kind.plural}", accepts, f"objects of {kind.plural}")


def object_with(**fields: FieldKind) -> FieldKind:
    """Return the kind of objects with these fields."""

    def accepts(x: Any) -> bool:
        return isinstance(x, dict) and all(name in x and kind.accepts(x[name]) for name, kind in fields.items())

    what = " and ".join(f"{name} ({kind.singular})" for name, kind in fields.items())
    return FieldKind(f"an object with {what}", accepts, f"objects with {what}")


def each(kind: FieldKind, *names: str) -> dict[str, FieldKind]:
    """Return a table that gives all these fields the same kind."""
    return dict.fromkeys(names, kind)


ANYTHING = FieldKind("anything", lambda value: True, "anything")
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool), "true or false")
TEXT = FieldKind("a string", lambda value: isinstance(value, str), "strings", str)
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict), "objects")
NULL = FieldKind("null", lambda value: value is None, "null")

LAYERS, EXPERTS, MAX_ROWS = 4096, 4096, 2**24
LAYER_COUNT, SIZE, TOKENS, ROWS = integer(1, LAYERS), integer(1, 2**20), integer(2, 2**40), integer(1, MAX_ROWS)
HEAD_COUNT, EXPERT_COUNT = integer(1, 4096), integer(1, EXPERTS)
EPS, BASE, FACTOR, SHARE = number(0, 1), number(2, 1e15), number(1e-6, 1e9), number(0, 1)
_ID = integer(0, 2**32 - 1)

IDENTITY: Mapping[str, FieldKind] = {
    "model_type": TEXT,
    "architectures": list_of(TEXT) | NULL,
    "is_encoder_decoder": FLAG | NULL,
    **{name: integer(0, LAYERS) | NULL for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer")},
    "eos_token_id": _ID | list_of(_ID) | NULL,
    "tie_word_embeddings": FLAG | NULL,
    "vocab_size": ROWS | NULL,
}
"""config.json of any model, including models that run through transformers."""

ROPE: Mapping[str, FieldKind] = {
    **each(TEXT | NULL, "type", "rope_type"),
    "rope_theta": BASE | NULL,
    "partial_rotary_factor": SHARE | NULL,
    **each(
        FACTOR | NULL, "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"
    ),
    "original_max_position_embeddings": number(2, 2**40) | NULL,
    **each(number(0, 1e6) | NULL, "mscale", "mscale_all_dim"),
    "truncate": FLAG | NULL,
    **each(list_of(FACTOR) | NULL, "short_factor", "long_factor"),
}
"""`rope_scaling` and `rope_parameters`. The latter may contain one such object for each layer type."""

DECODER: Mapping[str, FieldKind] = {
    **each(ROWS, "vocab_size", "intermediate_size"),
    **each(SIZE, "hidden_size", "num_attention_heads"),
    "num_hidden_layers": LAYER_COUNT,
    **each(SIZE | NULL, "num_key_value_heads", "head_dim"),
    "max_position_embeddings": TOKENS,
    "original_max_position_embeddings": TOKENS | NULL,
    "rms_norm_eps": EPS,
    "hidden_act": TEXT,
    "rope_theta": BASE,
    **each(OBJECT | NULL, "rope_scaling", "rope_parameters"),
    "rope_freqs": list_of(number(1e-6, 1e38)) | NULL,
    "partial_rotary_factor": SHARE | NULL,
    "sliding_window": integer(1) | NULL,
    **each(FACTOR | NULL, "attn_logit_softcapping", "final_logit_softcapping"),
    "layer_types": list_of(TEXT) | NULL,
}
"""config.json of a model that runs in Paceline's own decoder."""

GENERATION: Mapping[str, FieldKind] = {
    "eos_token_id": _ID | list_of(_ID) | NULL,
    "do_sample": FLAG | NULL,
    "temperature": number(0, 1000) | NULL,
    "top_k": integer(-1) | NULL,
    **each(SHARE | NULL, "top_p", "min_p", "typical_p"),
    "repetition_penalty": number(1e-3, 1000) | NULL,
    "no_repeat_ngram_size": integer() | NULL,
}
"""generation_config.json."""

_NAMED = TEXT | object_with(content=TEXT) | NULL
TOKENIZER: Mapping[str, FieldKind] = {
    **{f"{role}_token": _NAMED for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")},
    "add_bos_token": FLAG | NULL,
    "add_eos_token": FLAG | NULL,
    "added_tokens_decoder": object_of(object_with(content=TEXT)) | NULL,
    "chat_template": TEXT | object_of(TEXT) | list_of(object_with(name=TEXT, template=TEXT)) | NULL,
}
"""tokenizer_config.json and special_tokens_map.json."""

ADAPTER: Mapping[str, FieldKind] = {
    "r": integer(1, 2**20),
    "lora_alpha": number(-1e6, 1e6),
    "rank_pattern": object_of(integer(1, 2**20)) | NULL,
    "alpha_pattern": object_of(number(-1e6, 1e6)) | NULL,
    **each(TEXT | NULL, "peft_type", "base_model_name_or_path", "revision"),
}
"""adapter_config.json."""

INDEX: Mapping[str, FieldKind] = {"weight_map": object_of(TEXT)}
"""model.safetensors.index.json and others."""

HEAD_IDENTITY: Mapping[str, FieldKind] = {"architectures": list_of(TEXT) | NULL, "speculators_model_type": TEXT | NULL}
"""config.json of a folder that may be a learned drafter: the fields that distinguish it from a model."""

HEAD: Mapping[str, FieldKind] = {
    **each(
        OBJECT | NULL, "speculators_config", "paceline", "eagle_config", "dflash_config", "dspark_config", "verifier"
    ),
    "transformer_layer_config": OBJECT,
    **each(
        list_of(integer(0, LAYERS)) | NULL,
        *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"),
    ),
    **each(LAYER_COUNT | NULL, "num_target_layers", "target_layers"),
    **each(SIZE | NULL, "target_hidden_size", "hidden_size"),
    **each(ROWS | NULL, "draft_vocab_size", "vocab_size"),
    "block_size": integer(2, 4096) | NULL,
    "mask_token_id": _ID | NULL,
    "layers": integer(0, LAYERS),
    "rank": integer(0, 2**20),
    "markov_rank": integer(0, 2**20) | NULL,
    **each(integer(1, 2**20) | NULL, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "paths": list_of(list_of(integer())),
    **each(TEXT | NULL, "target", "name_or_path", "base_model_name_or_path"),
}
"""config.json of a learned drafter, and the objects within it."""

GGUF: Mapping[str, FieldKind] = {
    **each(TEXT, "general.architecture", "general.type"),
    "split.count": integer(0, 65535),
    **each(TEXT, "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    **each(list_of(TEXT), "tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    "tokenizer.ggml.token_type": list_of(integer()),
    "tokenizer.ggml.scores": list_of(number(-1e30, 1e30)),
    "tokenizer.ggml.add_space_prefix": FLAG,
    **{f"tokenizer.ggml.add_{role}_token": FLAG for role in ("bos", "eos")},
    **{f"tokenizer.ggml.{role}_token_id": _ID for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask")},
}
"""GGUF metadata that is the same for every architecture."""

_PER_LAYER = list_of(ANYTHING)
GGUF_ARCHITECTURE: Mapping[str, FieldKind] = {
    "block_count": LAYER_COUNT,
    **each(TOKENS, "context_length", "rope.scaling.original_context_length"),
    **each(SIZE, "embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    "feed_forward_length": integer(0, MAX_ROWS) | _PER_LAYER,
    **each(integer(0, 2**20) | _PER_LAYER, "attention.head_count", "attention.head_count_kv"),
    **each(EPS, "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    "attention.sliding_window": integer(),
    "attention.sliding_window_pattern": integer(1) | list_of(FLAG | integer()),
    "pooling_type": integer(),
    **each(FACTOR, "attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    "expert_count": integer(0, EXPERTS),
    "expert_used_count": EXPERT_COUNT,
    **each(ROWS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "nextn_predict_layers": integer(0, LAYERS),
    **each(integer(0, EXPERTS), "expert_group_count", "expert_group_used_count", "expert_shared_count"),
    "leading_dense_block_count": integer(0, LAYERS),
    "expert_weights_scale": number(0, 1e9),
    "expert_weights_norm": FLAG,
    "rope.scaling.finetuned": FLAG,
    "rope.dimension_sections": list_of(integer(0, 2**16)),
    "vocab_size": ROWS,
    "target_layers": list_of(integer(0, LAYERS)),
    "target_hidden_size": SIZE,
    "block_size": integer(2, 4096),
    **each(FLAG, "norm_before_residual", "norm_before_fc", "sample_from_anchor", "attention.causal"),
    "attention.value_scale": FACTOR,
    **each(SIZE, "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
    **each(BASE, "rope.freq_base", "rope.freq_base_swa"),
    "rope.scaling.type": TEXT,
    **each(number(0, 1e9), "attn_logit_softcapping", "final_logit_softcapping"),
    **each(number(0, 1e9), "rope.scale_linear", "rope.scaling.factor"),
    **{f"rope.scaling.yarn_{name}": number(0, 1e9) for name in ("beta_fast", "beta_slow", "attn_factor")},
}
"""GGUF metadata with keys that begin with the architecture's name ("llama.block_count")."""
