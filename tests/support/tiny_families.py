"""Tiny models of every family: transformers' name of each, and what its config changes. One table for all tests."""

from __future__ import annotations

from typing import Any

VOCAB = 101

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 5.0, 12.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS: dict[str, Any] = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}
LLAMA4: dict[str, Any] = {
    **{"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 80, "num_local_experts": 5},
    **{"attention_chunk_size": 4096, "floor_scale": 7},
}
SLIDES = {"use_sliding_window": True, "sliding_window": 20}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_key_value_heads": 6, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
}
GROUPS = {"n_group": 4, "topk_group": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases, sliding upper layers": (
        "Qwen3",
        {"head_dim": 8, "attention_bias": True, "max_window_layers": 2, **SLIDES},
    ),
    "mistral, sliding": ("Mistral", {"sliding_window": 24}),
    "qwen2, sliding upper layers": ("Qwen2", {"max_window_layers": 1, **SLIDES}),
    "qwen2": ("Qwen2", {}),
    "phi3, sliding": ("Phi3", {"sliding_window": 17}),
    "phi3, partial, short factors": (
        "Phi3",
        {
            "head_dim": 12,
            "num_attention_heads": 4,
            "partial_rotary_factor": 0.7,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 1800,
        },
    ),
    "phi3, long factors": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 30}),
    "smollm3": ("SmolLM3", {"mlp_bias": True, "attention_bias": True, "no_rope_layer_interval": 2}),
    "smollm3, sliding": ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1], **SLIDES}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "num_hidden_layers": 2, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0},
    ),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3, stretched": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 19}),
    "qwen3 moe": ("Qwen3Moe", {"norm_topk_prob": True, **EXPERTS}),
    "qwen3 moe, some layers dense": ("Qwen3Moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], **EXPERTS}),
    "qwen3 moe, sliding": ("Qwen3Moe", {"mlp_only_layers": [0], **SLIDES, **EXPERTS}),
    "gpt-oss": ("GptOss", {**GPT_OSS, "sliding_window": 18}),
    "gpt-oss, other layers slide": (
        "GptOss",
        {**GPT_OSS, "sliding_window": 21, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
    ),
    "ministral, sliding": (
        "Ministral",
        {
            **{"head_dim": 8, "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
            **{"logits_scaling": 2.5, "attention_bias": True},
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_bias": True}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3, sliding": ("Olmo3", {"sliding_window": 18}),
    "olmo3, sliding, stretched": (
        "Olmo3",
        {
            "sliding_window": 18,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": None, "head_dim": 16, "layer_types": ["full_attention"] * 4}),
    "exaone4, sliding": ("Exaone4", {"sliding_window": 18, "sliding_window_pattern": 2, "head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4.5": (
        "Glm4Moe",
        {
            **{"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.7,
                "use_qk_norm": True,
                "attention_bias": True,
            },
        },
    ),
    "glm4.5 without groups": (
        "Glm4Moe",
        {
            **{"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False},
        },
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}),
    "llama4 as published": (
        "Llama4Text",
        {
            **{**LLAMA4, "attention_chunk_size": 8192, "floor_scale": 8192},
            "rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
    ),
    "llama4, sliding": (
        "Llama4Text",
        {
            **{**LLAMA4, "attention_chunk_size": 20, "no_rope_layers": [1, 0, 1, 1], "num_experts_per_tok": 2},
            "rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "llama4 without experts": (
        "Llama4Text",
        {
            **{**LLAMA4, **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step"), 0)},
            **{"moe_layers": [], "no_rope_layers": [1] * 4, "layer_types": ["full_attention"] * 4},
        },
    ),
    "llama4, dense": ("Llama4Text", {**LLAMA4, "moe_layers": [], "use_qk_norm": False, "attn_scale": 0.5}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "deepseek v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "deepseek v2, no query latent, groups, stretched": (
        "DeepseekV2",
        {
            **{**LATENT, **GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v3": ("DeepseekV3", {**LATENT, **GROUPS, "attention_bias": True}),
    "deepseek v3, halves, stretched": (
        "DeepseekV3",
        {
            **{**LATENT, **GROUPS, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.3},
        },
    ),
    "glm 4.7 flash": ("Glm4MoeLite", {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere, norms of heads": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True}),
    "cohere2, sliding": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 18}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2, sliding": ("Starcoder2", {"sliding_window": 21, "use_bias": False}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "phi": ("Phi", {"hidden_size": 96, "num_attention_heads": 4}),
    "phi, norms of heads": ("Phi", {"qk_layernorm": True}),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 96, "num_attention_heads": 4, "rotary_pct": 0.5}),
    "gpt-neox, one after the other": ("GPTNeoX", {"rotary_pct": 0.75, "use_parallel_residual": False}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn, own temperature": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, "beta_fast": 16.0}},
    ),
    "longrope": (
        "Llama",
        {"rope_parameters": LONGROPE | {"factor": 3.0, "original_max_position_embeddings": 40, "rope_theta": 5e3}},
    ),
}
WINDOWED = [case for case in FAMILIES if "sliding" in case or case.startswith(("gemma", "mixtral", "gpt-oss"))]
DYNAMIC = ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 40})
"""The base of its positions depends on the length of the prompt, so it is in no list of families."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama untied, many heads": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "own head size": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
}

GEMMA4_SIZES: dict[str, Any] = SIZES | {
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 8, "global_head_dim": 16},
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    **{"sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    "final_logit_softcapping": 5.0,
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4, small": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4, large": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4, experts": {"hidden_size_per_layer_input": 0, **_GEMMA4_EXPERTS},
    "gemma4, all at once": {
        "num_kv_shared_layers": 3,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        **_GEMMA4_EXPERTS,
    },
}

HYBRID_SIZES: dict[str, Any] = SIZES | {
    **{"num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 8},
}
_SHARED_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 32}
_LFM2: dict[str, Any] = {"head_dim": 12, "full_attn_idxs": [1], "block_multiple_of": 16}
_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

_MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
}
_GRANITE: dict[str, Any] = {
    **{**_MAMBA, "layer_types": _TYPES, "shared_intermediate_size": 56, "num_local_experts": 0},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5},
}
_FALCON: dict[str, Any] = {**_MAMBA, "mamba_d_ssm": 96, "mamba_proj_bias": True, "projectors_bias": True}
_MULTIPLIERS: dict[str, Any] = {
    **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.3},
    **{"attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8},
    **{"mlp_multipliers": [0.9, 1.4], "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 1.1]},
}
_NEMOTRON: dict[str, Any] = {
    **{"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "mlp_hidden_act": "relu2"},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.7},
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-2": ("Mamba2", {"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2}),
    "mamba-2 with biases, one group": (
        "Mamba2",
        {"num_heads": 3, "head_dim": 32, "state_size": 5, "n_groups": 1, "use_bias": True, "use_conv_bias": False},
    ),
    "granite 4": ("GraniteMoeHybrid", _GRANITE),
    "granite 4, experts, positions": (
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
    ),
    "granite 4, attention alone": (
        "GraniteMoeHybrid",
        {**_GRANITE, "layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1", {**_FALCON, **_MULTIPLIERS}),
    "falcon-h1, normed": ("FalconH1", {**_FALCON, "mamba_rms_norm": True, "attention_bias": True}),
    "falcon-h1, normed after its gate": (
        "FalconH1",
        {**_FALCON, **_MULTIPLIERS, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron-h": (
        "NemotronH",
        {**_NEMOTRON, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron-h, experts": (
        "NemotronH",
        {**_NEMOTRON, "layer_types": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    ),
    "lfm2 moe": (
        "Lfm2Moe",
        {**_LFM2, **_SHARED_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "qwen3 next": ("Qwen3Next", {**_SHARED_EXPERTS, "layer_types": _TYPES, "decoder_sparse_step": 2}),
    "qwen3 next, experts of unscaled weights": ("Qwen3Next", {**_SHARED_EXPERTS, "norm_topk_prob": False}),
    "qwen3.5": ("Qwen3_5Text", {}),
    "qwen3.5, as many key heads": ("Qwen3_5Text", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2}),
    "lfm2": ("Lfm2", {**_LFM2, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2 with biases, own width": ("Lfm2", {**_LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "qwen3.5 moe": ("Qwen3_5MoeText", {**_SHARED_EXPERTS, "layer_types": _TYPES}),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (kind, SIZES | changes) for case, (kind, changes) in (FAMILIES | DENSE | {"dynamic": DYNAMIC}).items()},
    **{case: ("Gemma4Text", GEMMA4_SIZES | changes) for case, changes in GEMMA4.items()},
    **{case: (kind, HYBRID_SIZES | changes) for case, (kind, changes) in HYBRIDS.items()},
}
"""Every tiny model, its config whole."""
