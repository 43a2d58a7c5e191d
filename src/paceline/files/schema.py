"""Type and range of each field of a model's files, in one table per file.

Everything read from JSON or GGUF metadata passes `check` before it is used, so that later code can rely on types and
sizes. The upper bounds are far above any published model, and low enough that nothing sized by them alone exhausts time
or memory. Fields that no table names are not read, or only compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, one_line

CORRECT = "Correct the file or fetch the model again"
"""Fix for a wrong config, which may have been edited by hand."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """Kind of value of a field: `what` in words ("a string"), `holds` as a test, `many` as the plural of `what`."""

    what: str
    holds: Callable[[Any], bool]
    many: str = ""

    def __or__(self, other: FieldKind) -> FieldKind:
        many = f"{self.many} or {other.many}"
        return FieldKind(f"{self.what} or {other.what}", lambda value: self.holds(value) or other.holds(value), many)


def check(where: str | Path, values: Mapping[str, Any], fields: Mapping[str, FieldKind]) -> None:
    """Raise `CorruptModel` for the first field whose value is not of its kind. Fields may be absent."""
    for name, kind in fields.items():
        if name in values:
            check_value(where, name, values[name], kind)


def check_value(where: str | Path, name: str, value: Any, kind: FieldKind) -> None:
    """Check a single field."""
    if not kind.holds(value):
        raise CorruptModel(f"{where}: {name} must be {kind.what}, got {shown(value)}", CORRECT)


def shown(value: Any) -> str:
    """Return a value as error messages quote it."""
    return one_line("null" if value is None else repr(value), 80)


def whole(low: int = 0, high: int = 2**31 - 1) -> FieldKind:
    """Whole number in this range, both ends included."""

    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return FieldKind(f"a whole number from {low} to {high}", holds, f"whole numbers from {low} to {high}")


def number(low: float, high: float) -> FieldKind:
    """Finite number in this range, both ends included."""

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return low <= value <= high and math.isfinite(value)

    return FieldKind(f"a number from {low:g} to {high:g}", holds, f"numbers from {low:g} to {high:g}")


def listed(kind: FieldKind) -> FieldKind:
    """List of elements of this kind."""

    def holds(value: Any) -> bool:
        return isinstance(value, list) and all(map(kind.holds, value))

    return FieldKind(f"a list of {kind.many}", holds, f"lists of {kind.many}")


def mapping(kind: FieldKind) -> FieldKind:
    """Object with values of this kind."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(map(kind.holds, value.values()))

    return FieldKind(f"an object of {kind.many}", holds, f"objects of {kind.many}")


def record(**fields: FieldKind) -> FieldKind:
    """Object with these fields, of these kinds."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and all(
            name in value and kind.holds(value[name]) for name, kind in fields.items()
        )

    what = " and ".join(f"{name} ({kind.what})" for name, kind in fields.items())
    return FieldKind(f"an object with {what}", holds, f"objects with {what}")


ANYTHING = FieldKind("anything", lambda value: True, "anything")
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool), "true or false")
TEXT = FieldKind("a string", lambda value: isinstance(value, str), "strings")
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict), "objects")
NULL = FieldKind("null", lambda value: value is None, "null")

LAYERS, EXPERTS = 4096, 4096
_LAYERS, _SIZE, _TOKENS, _ROWS = whole(1, LAYERS), whole(1, 2**20), whole(2, 2**40), whole(1, 2**24)
_ID, _EXPERTS = whole(0, 2**32 - 1), whole(1, EXPERTS)
_EPS, _BASE, _FACTOR, _SHARE = number(0, 1), number(2, 1e15), number(1e-6, 1e9), number(0, 1)
_CAP = number(1e-6, 1e9)

IDENTITY: Mapping[str, FieldKind] = {
    "model_type": TEXT,
    "architectures": listed(TEXT) | NULL,
    "is_encoder_decoder": FLAG | NULL,
    **{name: whole(0, LAYERS) | NULL for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer")},
    "eos_token_id": _ID | listed(_ID) | NULL,
    "tie_word_embeddings": FLAG | NULL,
    "vocab_size": _ROWS | NULL,
}
"""config.json of any model, native or not."""

ROPE: Mapping[str, FieldKind] = {
    "type": TEXT | NULL,
    "rope_type": TEXT | NULL,
    "rope_theta": _BASE | NULL,
    "partial_rotary_factor": _SHARE | NULL,
    "factor": _FACTOR | NULL,
    "low_freq_factor": _FACTOR | NULL,
    "high_freq_factor": _FACTOR | NULL,
    "original_max_position_embeddings": number(2, 2**40) | NULL,
    "beta_fast": _FACTOR | NULL,
    "beta_slow": _FACTOR | NULL,
    "attention_factor": _FACTOR | NULL,
    "mscale": number(0, 1e6) | NULL,
    "mscale_all_dim": number(0, 1e6) | NULL,
    "truncate": FLAG | NULL,
    "short_factor": listed(_FACTOR) | NULL,
    "long_factor": listed(_FACTOR) | NULL,
}
"""`rope_scaling` and `rope_parameters`; the latter may hold one such object per layer type."""

DECODER: Mapping[str, FieldKind] = {
    "vocab_size": _ROWS,
    "hidden_size": _SIZE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE | NULL,
    "head_dim": _SIZE | NULL,
    "intermediate_size": _ROWS,
    "max_position_embeddings": _TOKENS,
    "original_max_position_embeddings": _TOKENS | NULL,
    "rms_norm_eps": _EPS,
    "hidden_act": TEXT,
    "rope_theta": _BASE,
    "rope_scaling": OBJECT | NULL,
    "rope_parameters": OBJECT | NULL,
    "rope_freqs": listed(number(1e-6, 1e38)) | NULL,
    "partial_rotary_factor": _SHARE | NULL,
    "sliding_window": whole(1) | NULL,
    "attn_logit_softcapping": _CAP | NULL,
    "final_logit_softcapping": _CAP | NULL,
    "layer_types": listed(TEXT) | NULL,
}
"""config.json of a model that Paceline's own decoder runs."""

QWEN: Mapping[str, FieldKind] = {"use_sliding_window": FLAG | NULL, "max_window_layers": whole()}
SMOLLM3: Mapping[str, FieldKind] = {
    "use_sliding_window": FLAG | NULL,
    "no_rope_layers": listed(whole(0, 1)) | NULL,
    "no_rope_layer_interval": whole(1),
}
GEMMA: Mapping[str, FieldKind] = {
    "hidden_activation": TEXT,
    "query_pre_attn_scalar": _CAP,
    "rope_local_base_freq": _BASE,
    "sliding_window_pattern": whole(1),
}
MIXTURE: Mapping[str, FieldKind] = {
    "use_sliding_window": FLAG | NULL,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_intermediate_size": _ROWS,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": whole(1),
    "mlp_only_layers": listed(whole()) | NULL,
}

GENERATION: Mapping[str, FieldKind] = {
    "eos_token_id": _ID | listed(_ID) | NULL,
    "do_sample": FLAG | NULL,
    "temperature": number(0, 1000) | NULL,
    "top_k": whole(-1) | NULL,
    "top_p": number(0, 1) | NULL,
    "min_p": number(0, 1) | NULL,
    "typical_p": number(0, 1) | NULL,
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
    "peft_type": TEXT | NULL,
    "base_model_name_or_path": TEXT | NULL,
    "revision": TEXT | NULL,
}
"""adapter_config.json."""

_TAPS = listed(whole(0, LAYERS))
HEAD_IDENTITY: Mapping[str, FieldKind] = {
    "architectures": listed(TEXT) | NULL,
    "speculators_model_type": TEXT | NULL,
}
"""config.json of a folder that may be a learned drafter: the fields that tell it from a model."""

HEAD: Mapping[str, FieldKind] = {
    "speculators_config": OBJECT | NULL,
    "transformer_layer_config": OBJECT,
    "paceline": OBJECT | NULL,
    "eagle_config": OBJECT | NULL,
    "dflash_config": OBJECT | NULL,
    "eagle_aux_hidden_state_layer_ids": _TAPS | NULL,
    "aux_hidden_state_layer_ids": _TAPS | NULL,
    "target_layer_ids": _TAPS | NULL,
    "num_target_layers": _LAYERS | NULL,
    "target_layers": _LAYERS | NULL,
    "target_hidden_size": _SIZE | NULL,
    "draft_vocab_size": _ROWS | NULL,
    "hidden_size": _SIZE | NULL,
    "vocab_size": _ROWS | NULL,
    "block_size": whole(2, 4096) | NULL,
    "mask_token_id": _ID | NULL,
    "layers": whole(0, LAYERS),
    "rank": whole(0, 2**20),
    "paths": listed(listed(whole())),
    "verifier": OBJECT | NULL,
    "target": TEXT | NULL,
    "name_or_path": TEXT | NULL,
    "base_model_name_or_path": TEXT | NULL,
}
"""config.json of a learned drafter, and the objects within it."""

GGUF: Mapping[str, FieldKind] = {
    "general.architecture": TEXT,
    "general.type": TEXT,
    "split.count": whole(0, 65535),
    "tokenizer.chat_template": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": listed(TEXT),
    "tokenizer.ggml.token_type": listed(whole()),
    "tokenizer.ggml.scores": listed(number(-1e30, 1e30)),
    "tokenizer.ggml.merges": listed(TEXT),
    "tokenizer.ggml.add_space_prefix": FLAG,
    **{f"tokenizer.ggml.add_{role}_token": FLAG for role in ("bos", "eos")},
    **{f"tokenizer.ggml.{role}_token_id": _ID for role in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
"""GGUF metadata that is the same for every architecture."""

_PER_LAYER = listed(ANYTHING)
GGUF_ARCHITECTURE: Mapping[str, FieldKind] = {
    "block_count": _LAYERS,
    "context_length": _TOKENS,
    "embedding_length": _SIZE,
    "feed_forward_length": _ROWS | _PER_LAYER,
    "attention.head_count": _SIZE | _PER_LAYER,
    "attention.head_count_kv": _SIZE | _PER_LAYER,
    "attention.key_length": _SIZE,
    "attention.value_length": _SIZE,
    "attention.layer_norm_rms_epsilon": _EPS,
    "attention.sliding_window": whole(),
    "attention.sliding_window_pattern": whole(1) | listed(FLAG | whole()),
    "attn_logit_softcapping": number(0, 1e9),
    "final_logit_softcapping": number(0, 1e9),
    "expert_count": whole(0, EXPERTS),
    "expert_used_count": _EXPERTS,
    "expert_feed_forward_length": _ROWS,
    "rope.dimension_count": _SIZE,
    "rope.freq_base": _BASE,
    "rope.freq_base_swa": _BASE,
    "rope.scale_linear": number(0, 1e9),
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": number(0, 1e9),
    "rope.scaling.original_context_length": _TOKENS,
    "rope.scaling.yarn_beta_fast": number(0, 1e9),
    "rope.scaling.yarn_beta_slow": number(0, 1e9),
    "rope.scaling.yarn_attn_factor": number(0, 1e9),
}
"""GGUF metadata whose keys begin with the architecture's name ("llama.block_count")."""
