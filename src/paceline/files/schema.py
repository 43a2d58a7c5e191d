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

CORRECT = "Correct the file or fetch the model again"
"""The advice for a wrong config, which may have been edited by hand."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A kind of value.

    Attributes:
        what: Description, such as "a string".
        holds: A function that returns True for values of this kind.
        many: Plural of `what`.
        every: A Python type whose values are all of this kind, or None. With it, a long list is checked by the set of
            its elements' types.
    """

    what: str
    holds: Callable[[Any], bool]
    many: str = ""
    every: type | None = None

    def __or__(self, other: FieldKind) -> FieldKind:
        many = f"{self.many} or {other.many}"
        return FieldKind(f"{self.what} or {other.what}", lambda value: self.holds(value) or other.holds(value), many)


def check(where: str | Path, values: Mapping[str, Any], fields: Mapping[str, FieldKind]) -> None:
    """Raise `CorruptModel` for the first field with a value of the wrong kind. Fields may be absent."""
    for name, kind in fields.items():
        if name in values:
            check_value(where, name, values[name], kind)


def check_value(where: str | Path, name: str, value: Any, kind: FieldKind) -> None:
    """Raise `CorruptModel` if the value of a field has the wrong kind."""
    if not kind.holds(value):
        raise CorruptModel(f"{where}: {name} must be {kind.what}, got {shown(value)}", CORRECT)


def shown(value: Any) -> str:
    """Format a value for error messages."""
    return one_line("null" if value is None else repr(value), 80)


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def whole(low: int = 0, high: int = 2**31 - 1) -> FieldKind:
    """Return the kind of whole numbers from `low` to `high`, inclusive."""
    what = f"from {low} to {high}"
    return FieldKind(
        f"a whole number {what}", lambda x: _is_number(x, int) and low <= x <= high, f"whole numbers {what}"
    )


def number(low: float, high: float) -> FieldKind:
    """Return the kind of finite numbers from `low` to `high`, inclusive."""

    def holds(x: Any) -> bool:
        return _is_number(x, (int, float)) and low <= x <= high and math.isfinite(x)

    return FieldKind(f"a number from {low:g} to {high:g}", holds, f"numbers from {low:g} to {high:g}")


def listed(kind: FieldKind) -> FieldKind:
    """Return the kind of lists with elements of this kind."""

    def holds(x: Any) -> bool:
        if not isinstance(x, list):
            return False
        types = set(map(type, x))
        # A vocabulary has hundreds of thousands of tokens, but its list of token types has few distinct numbers.
        return types == {kind.every} or all(map(kind.holds, set(x) if types == {int} else x))

    what = f"of {kind.many}"
    return FieldKind(f"a list {what}", holds, f"lists {what}")


def sized(kind: FieldKind, count: int) -> FieldKind:
    """Return the kind of lists with `count` elements of this kind."""
    some = listed(kind)
    return FieldKind(f"a list of {count} {kind.many}", lambda x: some.holds(x) and len(x) == count)


def mapping(kind: FieldKind) -> FieldKind:
    """Return the kind of objects with values of this kind."""

    def holds(x: Any) -> bool:
        return isinstance(x, dict) and all(map(kind.holds, x.values()))

    return FieldKind(f"an object of {kind.many}", holds, f"objects of {kind.many}")


def record(**fields: FieldKind) -> FieldKind:
    """Return the kind of objects with these fields."""

    def holds(x: Any) -> bool:
        return isinstance(x, dict) and all(name in x and kind.holds(x[name]) for name, kind in fields.items())

    what = " and ".join(f"{name} ({kind.what})" for name, kind in fields.items())
    return FieldKind(f"an object with {what}", holds, f"objects with {what}")


def each(kind: FieldKind, *names: str) -> dict[str, FieldKind]:
    """Return a table that gives all these fields the same kind."""
    return dict.fromkeys(names, kind)


ANYTHING = FieldKind("anything", lambda value: True, "anything")
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool), "true or false")
TEXT = FieldKind("a string", lambda value: isinstance(value, str), "strings", str)
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict), "objects")
NULL = FieldKind("null", lambda value: value is None, "null")

LAYERS, EXPERTS, MOST_ROWS = 4096, 4096, 2**24
LAYER_COUNT, SIZE, TOKENS, ROWS = whole(1, LAYERS), whole(1, 2**20), whole(2, 2**40), whole(1, MOST_ROWS)
HEAD_COUNT, EXPERT_COUNT = whole(1, 4096), whole(1, EXPERTS)
EPS, BASE, FACTOR, SHARE = number(0, 1), number(2, 1e15), number(1e-6, 1e9), number(0, 1)
_ID = whole(0, 2**32 - 1)

IDENTITY: Mapping[str, FieldKind] = {
    "model_type": TEXT,
    "architectures": listed(TEXT) | NULL,
    "is_encoder_decoder": FLAG | NULL,
    **{name: whole(0, LAYERS) | NULL for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer")},
    "eos_token_id": _ID | listed(_ID) | NULL,
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
    **each(listed(FACTOR) | NULL, "short_factor", "long_factor"),
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
    "rope_freqs": listed(number(1e-6, 1e38)) | NULL,
    "partial_rotary_factor": SHARE | NULL,
    "sliding_window": whole(1) | NULL,
    **each(FACTOR | NULL, "attn_logit_softcapping", "final_logit_softcapping"),
    "layer_types": listed(TEXT) | NULL,
}
"""config.json of a model that runs in Paceline's own decoder."""

GENERATION: Mapping[str, FieldKind] = {
    "eos_token_id": _ID | listed(_ID) | NULL,
    "do_sample": FLAG | NULL,
    "temperature": number(0, 1000) | NULL,
    "top_k": whole(-1) | NULL,
    **each(SHARE | NULL, "top_p", "min_p", "typical_p"),
    "repetition_penalty": number(1e-3, 1000) | NULL,
    "no_repeat_ngram_size": whole() | NULL,
}
"""generation_config.json."""

_NAMED = TEXT | record(content=TEXT) | NULL
TOKENIZER: Mapping[str, FieldKind] = {
    **{f"{role}_token": _NAMED for role in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")},
    "add_bos_token": FLAG | NULL,
    "add_eos_token": FLAG | NULL,
    "added_tokens_decoder": mapping(record(content=TEXT)) | NULL,
    "chat_template": TEXT | mapping(TEXT) | listed(record(name=TEXT, template=TEXT)) | NULL,
}
"""tokenizer_config.json and special_tokens_map.json."""

ADAPTER: Mapping[str, FieldKind] = {
    "r": whole(1, 2**20),
    "lora_alpha": number(-1e6, 1e6),
    "rank_pattern": mapping(whole(1, 2**20)) | NULL,
    "alpha_pattern": mapping(number(-1e6, 1e6)) | NULL,
    **each(TEXT | NULL, "peft_type", "base_model_name_or_path", "revision"),
}
"""adapter_config.json."""

INDEX: Mapping[str, FieldKind] = {"weight_map": mapping(TEXT)}
"""model.safetensors.index.json and others."""

HEAD_IDENTITY: Mapping[str, FieldKind] = {"architectures": listed(TEXT) | NULL, "speculators_model_type": TEXT | NULL}
"""config.json of a folder that may be a learned drafter: the fields that distinguish it from a model."""

HEAD: Mapping[str, FieldKind] = {
    **each(
        OBJECT | NULL, "speculators_config", "paceline", "eagle_config", "dflash_config", "dspark_config", "verifier"
    ),
    "transformer_layer_config": OBJECT,
    **each(
        listed(whole(0, LAYERS)) | NULL,
        *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"),
    ),
    **each(LAYER_COUNT | NULL, "num_target_layers", "target_layers"),
    **each(SIZE | NULL, "target_hidden_size", "hidden_size"),
    **each(ROWS | NULL, "draft_vocab_size", "vocab_size"),
    "block_size": whole(2, 4096) | NULL,
    "mask_token_id": _ID | NULL,
    "layers": whole(0, LAYERS),
    "rank": whole(0, 2**20),
    "markov_rank": whole(0, 2**20) | NULL,
    **each(whole(1, 2**20) | NULL, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "paths": listed(listed(whole())),
    **each(TEXT | NULL, "target", "name_or_path", "base_model_name_or_path"),
}
"""config.json of a learned drafter, and the objects within it."""

GGUF: Mapping[str, FieldKind] = {
    **each(TEXT, "general.architecture", "general.type"),
    "split.count": whole(0, 65535),
    **each(TEXT, "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    **each(listed(TEXT), "tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    "tokenizer.ggml.token_type": listed(whole()),
    "tokenizer.ggml.scores": listed(number(-1e30, 1e30)),
    "tokenizer.ggml.add_space_prefix": FLAG,
    **{f"tokenizer.ggml.add_{role}_token": FLAG for role in ("bos", "eos")},
    **{f"tokenizer.ggml.{role}_token_id": _ID for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask")},
}
"""GGUF metadata that is the same for every architecture."""

_PER_LAYER = listed(ANYTHING)
GGUF_ARCHITECTURE: Mapping[str, FieldKind] = {
    "block_count": LAYER_COUNT,
    **each(TOKENS, "context_length", "rope.scaling.original_context_length"),
    **each(SIZE, "embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    "feed_forward_length": whole(0, MOST_ROWS) | _PER_LAYER,
    **each(whole(0, 2**20) | _PER_LAYER, "attention.head_count", "attention.head_count_kv"),
    **each(EPS, "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    "attention.sliding_window": whole(),
    "attention.sliding_window_pattern": whole(1) | listed(FLAG | whole()),
    "pooling_type": whole(),
    **each(FACTOR, "attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    "expert_count": whole(0, EXPERTS),
    "expert_used_count": EXPERT_COUNT,
    **each(ROWS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "nextn_predict_layers": whole(0, LAYERS),
    **each(whole(0, EXPERTS), "expert_group_count", "expert_group_used_count", "expert_shared_count"),
    "leading_dense_block_count": whole(0, LAYERS),
    "expert_weights_scale": number(0, 1e9),
    "expert_weights_norm": FLAG,
    "rope.scaling.finetuned": FLAG,
    "rope.dimension_sections": listed(whole(0, 2**16)),
    "vocab_size": ROWS,
    "target_layers": listed(whole(0, LAYERS)),
    "target_hidden_size": SIZE,
    "block_size": whole(2, 4096),
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
