"""Types and ranges of the fields in a model's files, with one table for each kind of file.

All values from JSON or GGUF metadata pass `check` before they are used, so later code can rely on types and sizes. The
upper bounds are far above any published model, but low enough that no single field can exhaust time or memory. Fields
without an entry are not read, or only compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, one_line

CORRECT = "Correct the file or fetch the model again"
"""Remedy for a wrong config, which may have been edited by hand."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """A kind of value.

    Attributes:
        what: Description, such as "a string".
        holds: Returns True for values of this kind.
        many: Plural of `what`.
    """

    what: str
    holds: Callable[[Any], bool]
    many: str = ""

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
    what = f"of {kind.many}"
    return FieldKind(f"a list {what}", lambda x: isinstance(x, list) and all(map(kind.holds, x)), f"lists {what}")


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


def _each(kind: FieldKind, *names: str) -> dict[str, FieldKind]:
    return dict.fromkeys(names, kind)


ANYTHING = FieldKind("anything", lambda value: True, "anything")
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool), "true or false")
TEXT = FieldKind("a string", lambda value: isinstance(value, str), "strings")
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict), "objects")
NULL = FieldKind("null", lambda value: value is None, "null")

LAYERS, EXPERTS, MOST_ROWS = 4096, 4096, 2**24
_LAYERS, _SIZE, _TOKENS, _ROWS = whole(1, LAYERS), whole(1, 2**20), whole(2, 2**40), whole(1, MOST_ROWS)
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
"""config.json of any model, including models that run through transformers."""

ROPE: Mapping[str, FieldKind] = {
    **_each(TEXT | NULL, "type", "rope_type"),
    "rope_theta": _BASE | NULL,
    "partial_rotary_factor": _SHARE | NULL,
    **_each(
        _FACTOR | NULL, "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"
    ),
    "original_max_position_embeddings": number(2, 2**40) | NULL,
    **_each(number(0, 1e6) | NULL, "mscale", "mscale_all_dim"),
    "truncate": FLAG | NULL,
    **_each(listed(_FACTOR) | NULL, "short_factor", "long_factor"),
}
"""`rope_scaling` and `rope_parameters`. The latter may contain one such object for each layer type."""

DECODER: Mapping[str, FieldKind] = {
    **_each(_ROWS, "vocab_size", "intermediate_size"),
    **_each(_SIZE, "hidden_size", "num_attention_heads"),
    "num_hidden_layers": _LAYERS,
    **_each(_SIZE | NULL, "num_key_value_heads", "head_dim"),
    "max_position_embeddings": _TOKENS,
    "original_max_position_embeddings": _TOKENS | NULL,
    "rms_norm_eps": _EPS,
    "hidden_act": TEXT,
    "rope_theta": _BASE,
    **_each(OBJECT | NULL, "rope_scaling", "rope_parameters"),
    "rope_freqs": listed(number(1e-6, 1e38)) | NULL,
    "partial_rotary_factor": _SHARE | NULL,
    "sliding_window": whole(1) | NULL,
    **_each(_CAP | NULL, "attn_logit_softcapping", "final_logit_softcapping"),
    "layer_types": listed(TEXT) | NULL,
}
"""config.json of a model that runs in Paceline's own decoder."""

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
GEMMA4_LAYER: Mapping[str, FieldKind] = {"head_dim": _SIZE, "num_key_value_heads": _SIZE}
"""Sizes that may differ between layers of Gemma 4."""
GEMMA4: Mapping[str, FieldKind] = {
    "hidden_activation": TEXT,
    **_each(_SIZE | NULL, "global_head_dim", "num_global_key_value_heads"),
    "sliding_window": whole(1),
    "rope_parameters": OBJECT,
    "use_bidirectional_attention": TEXT | NULL,
    "hidden_size_per_layer_input": whole(0, 2**16) | NULL,
    "vocab_size_per_layer_input": whole(0, MOST_ROWS),
    **_each(FLAG, "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
    "num_kv_shared_layers": whole(0, LAYERS),
    "per_layer_config": OBJECT | NULL,
    **_each(_EXPERTS | NULL, "num_experts", "top_k_experts"),
    "moe_intermediate_size": _ROWS | NULL,
}
GRANITE = _each(_FACTOR, "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
MIXTURE: Mapping[str, FieldKind] = {
    "use_sliding_window": FLAG | NULL,
    **_each(_EXPERTS, "num_experts", "num_local_experts", "num_experts_per_tok"),
    "moe_intermediate_size": _ROWS,
    "norm_topk_prob": FLAG,
    **_each(_FACTOR, "swiglu_alpha", "swiglu_limit"),
    "decoder_sparse_step": whole(1),
    "mlp_only_layers": listed(whole()) | NULL,
}
GROUPED: Mapping[str, FieldKind] = {
    **_each(_EXPERTS | NULL, "num_experts_per_tok", "n_group", "topk_group"),
    **_each(whole(0, EXPERTS) | NULL, "n_routed_experts", "n_shared_experts"),
    "moe_intermediate_size": _ROWS,
    "first_k_dense_replace": whole(0, LAYERS) | NULL,
    "moe_layer_freq": whole(1),
    "routed_scaling_factor": _FACTOR,
    "norm_topk_prob": FLAG | NULL,
    "scoring_func": TEXT,
    "topk_method": TEXT,
    "mlp_layer_types": listed(TEXT) | NULL,
    "use_qk_norm": FLAG,
}
"""Experts in groups, and the layers that have experts: DeepSeek, GLM-4.5."""
LATENT: Mapping[str, FieldKind] = {
    **GROUPED,
    **_each(whole(1, 2**16), "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    "qk_rope_head_dim": whole(2, 2**16),
    "q_lora_rank": whole(0, 2**16) | NULL,
    "rope_interleave": FLAG | NULL,
}
LLAMA4: Mapping[str, FieldKind] = {
    **MIXTURE,
    **_each(whole(0, EXPERTS), "num_local_experts", "num_experts_per_tok"),
    "intermediate_size_mlp": _ROWS,
    "moe_layers": listed(whole()) | NULL,
    "interleave_moe_layer_step": whole(),
    "use_qk_norm": FLAG,
    "no_rope_layers": listed(whole(0, 1)) | NULL,
    "no_rope_layer_interval": whole(1),
    "attention_chunk_size": whole(1) | NULL,
    "attn_temperature_tuning": FLAG | whole(),
    "floor_scale": whole(1),
    "attn_scale": number(0, 1e3),
}
LAYER_NORM: Mapping[str, FieldKind] = {
    **_each(_EPS, "layer_norm_eps", "norm_epsilon"),
    "logit_scale": _FACTOR,
    "model_max_length": _TOKENS | NULL,
    "sliding_window_pattern": whole(1),
    **_each(FLAG | NULL, "use_parallel_residual", "qk_layernorm", "use_qk_norm"),
    "rotary_pct": _SHARE,
    "rotary_emb_base": _BASE,
}
_HEADS, _WIDTH = whole(1, 4096), whole(1, 4096)
HYBRID: Mapping[str, FieldKind] = {
    **MIXTURE,
    "full_attention_interval": whole(1),
    **_each(_HEADS, "linear_num_key_heads", "linear_num_value_heads"),
    **_each(_WIDTH, "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim": whole(1, 64),
    "linear_heads_tiled": FLAG,
    "shared_expert_intermediate_size": _ROWS,
}
MAMBA: Mapping[str, FieldKind] = {
    **GRANITE,
    **_each(_HEADS, "num_heads", "n_groups", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups"),
    **_each(_WIDTH, "head_dim", "state_size", "mamba_d_state", "ssm_state_size", "mamba_head_dim"),
    **_each(whole(1, 64), "conv_kernel", "mamba_d_conv"),
    "mamba_d_head": _WIDTH | FieldKind('"auto"', lambda value: value == "auto", '"auto"'),
    "mamba_expand": whole(1, 64),
    "mamba_d_ssm": _ROWS | NULL,
    "mamba_norm_before_gate": FLAG,
    "layer_norm_epsilon": _EPS,
    **_each(whole(0, EXPERTS), "num_local_experts", "n_routed_experts"),
    **_each(_EXPERTS, "num_experts_per_tok", "n_shared_experts"),
    **_each(_ROWS, "shared_intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    **_each(_ROWS | NULL, "moe_latent_size"),
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": _FACTOR,
    "n_group": whole(1, EXPERTS),
    **_each(listed(TEXT) | NULL, "layers_block_type"),
    "hybrid_override_pattern": TEXT | NULL,
    "attn_layer_indices": listed(whole()) | NULL,
    **_each(_FACTOR, "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    **_each(_FACTOR, "attention_in_multiplier", "attention_out_multiplier"),
    "mlp_multipliers": sized(_FACTOR, 2) | NULL,
    "ssm_multipliers": sized(_FACTOR, 5) | NULL,
}
SHORT_CONV: Mapping[str, FieldKind] = {
    "norm_eps": _EPS,
    "conv_L_cache": whole(1, 64),
    "full_attn_idxs": listed(whole()) | NULL,
    "block_ff_dim": _ROWS | NULL,
    "block_auto_adjust_ff_dim": FLAG,
    "block_ffn_dim_multiplier": number(0, 1e3) | NULL,
    "block_multiple_of": whole(1, MOST_ROWS),
    "num_dense_layers": whole(0, LAYERS),
    "routed_scaling_factor": _FACTOR,
}

GENERATION: Mapping[str, FieldKind] = {
    "eos_token_id": _ID | listed(_ID) | NULL,
    "do_sample": FLAG | NULL,
    "temperature": number(0, 1000) | NULL,
    "top_k": whole(-1) | NULL,
    **_each(_SHARE | NULL, "top_p", "min_p", "typical_p"),
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
    **_each(TEXT | NULL, "peft_type", "base_model_name_or_path", "revision"),
}
"""adapter_config.json."""

INDEX: Mapping[str, FieldKind] = {"weight_map": mapping(TEXT)}
"""model.safetensors.index.json and others."""

HEAD_IDENTITY: Mapping[str, FieldKind] = {"architectures": listed(TEXT) | NULL, "speculators_model_type": TEXT | NULL}
"""config.json of a folder that may be a learned drafter: the fields that distinguish it from a model."""

HEAD: Mapping[str, FieldKind] = {
    **_each(
        OBJECT | NULL, "speculators_config", "paceline", "eagle_config", "dflash_config", "dspark_config", "verifier"
    ),
    "transformer_layer_config": OBJECT,
    **_each(
        listed(whole(0, LAYERS)) | NULL,
        *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"),
    ),
    **_each(_LAYERS | NULL, "num_target_layers", "target_layers"),
    **_each(_SIZE | NULL, "target_hidden_size", "hidden_size"),
    **_each(_ROWS | NULL, "draft_vocab_size", "vocab_size"),
    "block_size": whole(2, 4096) | NULL,
    "mask_token_id": _ID | NULL,
    "layers": whole(0, LAYERS),
    "rank": whole(0, 2**20),
    "markov_rank": whole(0, 2**20) | NULL,
    **_each(whole(1, 2**20) | NULL, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "paths": listed(listed(whole())),
    **_each(TEXT | NULL, "target", "name_or_path", "base_model_name_or_path"),
}
"""config.json of a learned drafter, and the objects within it."""

GGUF: Mapping[str, FieldKind] = {
    **_each(TEXT, "general.architecture", "general.type"),
    "split.count": whole(0, 65535),
    **_each(TEXT, "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    **_each(listed(TEXT), "tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    "tokenizer.ggml.token_type": listed(whole()),
    "tokenizer.ggml.scores": listed(number(-1e30, 1e30)),
    "tokenizer.ggml.add_space_prefix": FLAG,
    **{f"tokenizer.ggml.add_{role}_token": FLAG for role in ("bos", "eos")},
    **{f"tokenizer.ggml.{role}_token_id": _ID for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask")},
}
"""GGUF metadata that is the same for every architecture."""

_PER_LAYER = listed(ANYTHING)
GGUF_ARCHITECTURE: Mapping[str, FieldKind] = {
    "block_count": _LAYERS,
    **_each(_TOKENS, "context_length", "rope.scaling.original_context_length"),
    **_each(_SIZE, "embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    **_each(_SIZE, "attention.key_length_swa", "rope.dimension_count_swa"),
    **_each(_SIZE, "attention.key_length_mla", "attention.value_length_mla"),
    **_each(whole(0, 2**16), "attention.q_lora_rank", "attention.kv_lora_rank"),
    "attention.temperature_scale": number(0, 1e9),
    "rope.scaling.yarn_log_multiplier": number(0, 1e6),
    "expert_gating_func": whole(0, 1000),
    "embedding_length_per_layer_input": whole(0, 2**16),
    "attention.shared_kv_layers": whole(0, LAYERS),
    "feed_forward_length": whole(0, MOST_ROWS) | _PER_LAYER,
    **_each(whole(0, 2**20) | _PER_LAYER, "attention.head_count", "attention.head_count_kv"),
    **_each(_EPS, "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    "attention.sliding_window": whole(),
    "attention.sliding_window_pattern": whole(1) | listed(FLAG | whole()),
    "pooling_type": whole(),
    "use_parallel_residual": FLAG,
    **_each(_FACTOR, "attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    "expert_count": whole(0, EXPERTS),
    "expert_used_count": _EXPERTS,
    **_each(_ROWS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    "shortconv.l_cache": whole(1, 64),
    **_each(whole(0, LAYERS), "nextn_predict_layers", "interleave_moe_layer_step"),
    **_each(whole(0, EXPERTS), "expert_group_count", "expert_group_used_count", "expert_shared_count"),
    "leading_dense_block_count": whole(0, LAYERS),
    "moe_latent_size": whole(0, MOST_ROWS),
    "expert_weights_scale": number(0, 1e9),
    "expert_weights_norm": FLAG,
    "rope.scaling.finetuned": FLAG,
    "vocab_size": _ROWS,
    "target_layers": listed(whole(0, LAYERS)),
    "target_hidden_size": _SIZE,
    "block_size": whole(2, 4096),
    **_each(FLAG, "norm_before_residual", "norm_before_fc", "sample_from_anchor", "attention.causal"),
    "attention.value_scale": _FACTOR,
    "full_attention_interval": whole(1),
    "attention.recurrent_layers": listed(FLAG | whole()),
    **_each(_SIZE, "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
    **_each(_BASE, "rope.freq_base", "rope.freq_base_swa"),
    "rope.scaling.type": TEXT,
    **_each(number(0, 1e9), "attn_logit_softcapping", "final_logit_softcapping"),
    **_each(number(0, 1e9), "rope.scale_linear", "rope.scaling.factor"),
    **{f"rope.scaling.yarn_{name}": number(0, 1e9) for name in ("beta_fast", "beta_slow", "attn_factor")},
}
"""GGUF metadata with keys that begin with the architecture's name ("llama.block_count")."""
