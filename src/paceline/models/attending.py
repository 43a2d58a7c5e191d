"""From the keys of a config to its layers: the families that attend in every layer; see `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT
from paceline.kernels.activations import LIMIT, SLOPE
from paceline.models.config import Experts, LayerConfig, ModelConfig, RopeConfig
from paceline.models.layer_types import FULL, SLIDING, read_types
from paceline.models.rope import read_rope

Raw = Mapping[str, Any]


def windows_everywhere(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Mistral, Phi-3: every layer has the sliding window."""
    return layered(base, [raw.get("sliding_window")] * base.layers)


def windows_by_type(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Ministral: `layer_types` says which layers slide, by default all if there is a window."""
    window = raw.get("sliding_window")
    return layered(base, layer_windows(raw, base, window, lambda i: window is not None))


def qwen(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Qwen2, and Qwen3 with its norms: the upper layers slide, if any."""
    window, first = raw["sliding_window"] if raw["use_sliding_window"] else None, raw["max_window_layers"]
    windows = layer_windows(raw, base, window, lambda i: window is not None and i >= first)
    return layered(replace(base, qk_norm=base.family == "qwen3"), windows)


def qwen3_moe(raw: Raw, base: ModelConfig) -> ModelConfig:
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    count = raw.get("num_experts", raw.get("num_local_experts", 128))
    experts = Experts(count, raw["num_experts_per_tok"], raw["moe_intermediate_size"], raw["norm_topk_prob"])
    dense = raw.get("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % raw["decoder_sparse_step"] == 0 for i in range(base.layers)]
    return layered(replace(base, qk_norm=True, experts=experts), [window] * base.layers, sparse=sparse)


def mixtral(raw: Raw, base: ModelConfig) -> ModelConfig:
    used, names = raw["num_experts_per_tok"], ("w1", "w3", "w2")
    experts = Experts(raw["num_local_experts"], used, base.ffn, True, "block_sparse_moe", names)
    windows = [raw.get("sliding_window")] * base.layers
    return layered(replace(base, experts=experts), windows, sparse=[True] * base.layers)


def gpt_oss(raw: Raw, base: ModelConfig) -> ModelConfig:
    """gpt-oss: every other layer slides, attention has sinks, and all layers are mixtures with a clamped SwiGLU."""
    if (given := (raw["swiglu_alpha"], raw["swiglu_limit"])) != (SLOPE, LIMIT):
        raise UnsupportedModel(
            f"swiglu_alpha and swiglu_limit {given} are not supported", f"OpenAI's models have {SLOPE} and {LIMIT}"
        )
    experts = Experts(raw["num_local_experts"], raw["num_experts_per_tok"], base.ffn, True, router="router")
    base = replace(base, experts=experts, activation="clamped_swiglu", sinks=True)
    windows = layer_windows(raw, base, raw["sliding_window"], lambda i: i % 2 == 0)
    return layered(base, windows, sparse=[True] * base.layers)


def granite(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Granite 3: Llama with factors of the embedding, the scores, the layers' outputs and the logits."""
    return replace(
        base,
        embed_scale=raw["embedding_multiplier"],
        query_scale=raw["attention_multiplier"],
        residual_scale=raw["residual_multiplier"],
        logits_divisor=raw["logits_scaling"],
    )


def gemma1(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Gemma 1, whose config may name its activation "gelu", which was never computed."""
    return replace(base, norm_shift=1.0, embed_scale=base.hidden**0.5, activation="gelu_pytorch_tanh")


def smollm3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """SmolLM3: every fourth layer encodes no positions, and only such a layer may slide."""
    every = raw["no_rope_layer_interval"]
    rotates = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(base.layers)]
    if len(rotates) < base.layers:
        raise CorruptModel(f"no_rope_layers names {len(rotates)} of {base.layers} layers", CORRECT)
    window = raw.get("sliding_window") if raw["use_sliding_window"] else None
    windows = layer_windows(raw, base, window, lambda i: window is not None and not rotates[i])
    return layered(base, windows, [base.rope if rotates[i] else None for i in range(base.layers)])


def gemma(raw: Raw, base: ModelConfig, every: int, local: RopeConfig | None = None) -> ModelConfig:
    """Gemma 2 and 3: one layer in `every` sees everything, the others slide; norms before and after each part.
    `local`: the rotary embedding of the layers that slide, if they have another."""
    windows = layer_windows(raw, base, raw["sliding_window"], lambda i: (i + 1) % every != 0)
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
    return layered(base, windows, [local if local and window else base.rope for window in windows])


def gemma3(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Gemma 3: also norms of queries and keys, and another rotary base in the layers that slide."""
    own = (raw.get("rope_parameters") or {}).get(SLIDING)
    local = read_rope(own, raw, raw["rope_local_base_freq"], base.head_dim)
    return replace(gemma(raw, base, raw["sliding_window_pattern"], local), qk_norm=True)


def layer_windows(raw: Raw, base: ModelConfig, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer: by `layer_types`, or if it is missing by `default`."""
    types = read_types(raw.get("layer_types"), base, (FULL, SLIDING), lambda i: SLIDING if default(i) else FULL)
    if window is None and SLIDING in types:
        raise CorruptModel("layer_types names layers that slide, and sliding_window no window", CORRECT)
    return [window if kind == SLIDING else None for kind in types]


def layered(
    base: ModelConfig,
    windows: Sequence[int | None],
    ropes: Sequence[RopeConfig | None] | None = None,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """The config with these layers. A window as wide as the context is dropped."""
    ropes, sparse = ropes or [base.rope] * base.layers, sparse or [False] * base.layers
    bounded = [w if w and w < base.context_length else None for w in windows]
    return replace(base, special=tuple(map(LayerConfig, ropes, bounded, sparse)))
