"""Metadata of further architectures in Hugging Face's terms; see `gguf.py`."""

from __future__ import annotations

from collections.abc import Callable

from paceline.checkpoints.gguf_metadata import Config, Metadata, by_layer, layer_types
from paceline.checkpoints.gguf_tensors import ROPE_FACTORS
from paceline.errors import UnsupportedModel


def _gemma4(meta: Metadata, config: Config) -> Config:
    """Gemma 4, of which the metadata names the sizes of both kinds of layers, and the planes that turn by the factors
    of their wavelengths."""
    layers, types = config["num_hidden_layers"], layer_types(meta, config["num_hidden_layers"], 6)
    shared = meta.get("attention.shared_kv_layers", 0)
    widths = by_layer(meta["feed_forward_length"], layers)
    double = [widths[0] * (2 if i >= layers - shared else 1) for i in range(layers)]
    if widths not in (double, widths[:1] * layers):
        raise UnsupportedModel(f"{meta.file.path.name} has layers of different widths", "Use a uniform model")
    heads = by_layer(meta.get("attention.head_count_kv", config["num_attention_heads"]), layers)
    factors = meta.factors(ROPE_FACTORS[0]) or [1.0]
    turning = factors.count(1.0)
    if any(factor < 1e20 for factor in factors[turning:]):
        raise UnsupportedModel(f"{meta.file.path.name} stretches some wavelengths", "Use another model")
    sizes = {False: config["head_dim"], True: meta.get("attention.key_length_swa", config["head_dim"])}
    slides = [kind == "sliding_attention" for kind in types]
    whole = {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    near = meta.get("rope.dimension_count_swa", sizes[True]) / sizes[True]
    return {
        "model_type": "gemma4_text",
        "num_key_value_heads": heads[0],
        "head_dim": sizes[True],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths != widths[:1] * layers,
        "layer_types": types,
        "per_layer_config": {
            str(i): {"head_dim": sizes[slides[i]], "num_key_value_heads": heads[i]} for i in range(layers)
        },
        "rope_parameters": {
            "full_attention": {**whole, "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_theta": meta.get("rope.freq_base_swa"), "partial_rotary_factor": near},
        },
        **dict.fromkeys(("rope_freqs", "rope_scaling")),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in meta.file.tensors for i in range(layers - shared)),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "enable_moe_block": bool(meta.get("expert_count")),
        "num_experts": meta.get("expert_count") or None,
        "top_k_experts": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
    }


def _olmo(meta: Metadata, config: Config) -> Config:
    """OLMo 2, or OLMo 3, which has windows."""
    if not config["sliding_window"]:
        return {"model_type": "olmo2"}
    return {"model_type": "olmo3", "layer_types": layer_types(meta, config["num_hidden_layers"], 4)}


def _exaone4(meta: Metadata, config: Config) -> Config:
    every = 4 if config["sliding_window"] else 1
    types = layer_types(meta, config["num_hidden_layers"], every)
    return {
        "model_type": "exaone4",
        "layer_types": types,
        "sliding_window_pattern": 4 if "sliding_attention" in types else 0,
    }


def _glm4(meta: Metadata, config: Config) -> Config:
    return {"model_type": "glm4", **_rotated(meta, config)}


def _rotated(meta: Metadata, config: Config) -> Config:
    return {"partial_rotary_factor": meta.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _cohere(meta: Metadata, config: Config) -> Config:
    """Command R, the largest with norms of queries and keys, or its successors, which have windows."""
    own = {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": meta.get("logit_scale", 0.0) or 1.0}
    if meta.architecture == "cohere2":
        return {**own, "model_type": "cohere2", "layer_types": layer_types(meta, config["num_hidden_layers"], 4)}
    return {**own, "model_type": "cohere", "use_qk_norm": _has(meta, "attn_q_norm")}


def _starcoder2(meta: Metadata, config: Config) -> Config:
    return {"model_type": "starcoder2", "norm_epsilon": config["rms_norm_eps"], "hidden_act": "gelu_pytorch_tanh"}


def _stablelm(meta: Metadata, config: Config) -> Config:
    """StableLM. As in llama.cpp, the tensors tell whether its parts are side by side: the metadata may be wrong."""
    return {
        "model_type": "stablelm",
        "layer_norm_eps": config["rms_norm_eps"],
        "use_parallel_residual": not _has(meta, "ffn_norm"),
        "qk_layernorm": _has(meta, "attn_q_norm"),
        **_rotated(meta, config),
    }


def _phi(meta: Metadata, config: Config) -> Config:
    own = {"model_type": "phi", "layer_norm_eps": config["rms_norm_eps"], "hidden_act": "gelu_new"}
    return {**own, **_rotated(meta, config)}


def _neox(meta: Metadata, config: Config) -> Config:
    return {
        "model_type": "gpt_neox",
        "layer_norm_eps": config["rms_norm_eps"],
        "hidden_act": "gelu",
        "use_parallel_residual": meta["use_parallel_residual"],
        "rotary_emb_base": config["rope_theta"],
        **_rotated(meta, config),
    }


def _has(meta: Metadata, part: str) -> bool:
    """Whether the first layer has a weight of this name."""
    return f"blk.0.{part}.weight" in meta.file.tensors


def _deepseek2(meta: Metadata, config: Config) -> Config:
    """DeepSeek V2 and V3, and others with V3's layers, which are told apart by how experts are scored. In newer files
    the sizes of heads are those of rows of the cache, and those that are meant have keys of their own."""
    tensors = meta.file.tensors
    if meta.get("attention.temperature_scale"):
        raise UnsupportedModel(f"{meta.file.path.name} scales queries by their position", "Use another model")
    biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
    sigmoid = meta.get("expert_gating_func") == 2 or (biased and not meta.get("expert_gating_func"))
    rotary = meta["rope.dimension_count"]
    experts = _experts(meta)
    limited = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    scaling, multiplier = config["rope_scaling"], meta.get("rope.scaling.yarn_log_multiplier")
    if scaling and multiplier:
        scaling = scaling | dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    return {
        **experts,
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "rope_scaling": scaling,
        "head_dim": rotary,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": meta["attention.kv_lora_rank"],
        "q_lora_rank": meta["attention.q_lora_rank"] if any(".attn_q_a." in name for name in tensors) else 0,
        "qk_nope_head_dim": (meta.get("attention.key_length_mla") or meta["attention.key_length"]) - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": meta.get("attention.value_length_mla") or meta["attention.value_length"],
        "mlp_layer_types": [
            "sparse" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "dense"
            for i in range(config["num_hidden_layers"])
        ],
        "topk_method": "noaux_tc" if sigmoid else limited,
    }


def _experts(meta: Metadata) -> Config:
    """The experts of DeepSeek and GLM-4.5, as the former's configs name them."""
    return {
        "n_routed_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta["expert_used_count"] if meta.get("expert_count", 0) else None,
        "n_shared_experts": meta.get("expert_shared_count", 0),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
        "n_group": meta.get("expert_group_count", 0) or 1,
        "topk_group": meta["expert_group_used_count"] if meta.get("expert_group_count", 0) > 1 else 1,
    }


def _glm4_moe(meta: Metadata, config: Config) -> Config:
    # Not by the first layer: a file may hold the MTP layer alone.
    normed = any(name.endswith(".attn_q_norm.weight") for name in meta.file.tensors)
    dense = meta.get("leading_dense_block_count", 0)
    own = {"model_type": "glm4_moe", "use_qk_norm": normed, "first_k_dense_replace": dense}
    return {**_experts(meta), **_glm4(meta, config), **own}


_MAVERICK = 128
"""Experts of the one Llama 4 that does not norm queries and keys, by which llama.cpp tells it too."""


def _llama4(meta: Metadata, config: Config) -> Config:
    """Llama 4, of which the metadata names neither chunks nor temperatures: all models have the same. Small ones
    (MobileLLM-R1) have no experts."""
    whole = meta.get("attention.sliding_window") == 0
    count = meta.get("expert_count", 0)
    return {
        "model_type": "llama4_text",
        "intermediate_size": meta["expert_feed_forward_length"] if count else config["intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": count,
        "num_experts_per_tok": meta["expert_used_count"] if count else 0,
        "interleave_moe_layer_step": meta["interleave_moe_layer_step"] if count else 0,
        "use_qk_norm": count != _MAVERICK,
        "no_rope_layers": [1] * config["num_hidden_layers"] if whole else None,
        "layer_types": ["full_attention"] * config["num_hidden_layers"] if whole else None,
    }


MORE: dict[str, Callable[[Metadata, Config], Config]] = {
    "gemma4": _gemma4,
    "deepseek2": _deepseek2,
    "olmo2": _olmo,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "llama4": _llama4,
    "ernie4_5": lambda meta, config: {"model_type": "ernie4_5"},
    **dict.fromkeys(("command-r", "cohere2"), _cohere),
    **{"starcoder2": _starcoder2, "stablelm": _stablelm, "phi2": _phi, "gptneox": _neox},
    "qwen3vl": lambda meta, config: {"model_type": "qwen3_vl_text"},
}
"""As `gguf.ARCHITECTURES`."""
