"""Configs on the hub from before transformers 5, by family: their fields in addition to `tiny_families.SIZES`."""

from __future__ import annotations

from typing import Any

STRETCHED = {
    **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}
OLDER: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 64, "hidden_act": "gelu", "query_pre_attn_scalar": 144},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 64,
        "sliding_window_pattern": 3,
    },
    "phi3": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "sliding_window": 100,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3, "rope_theta": 1e6},
    "qwen3": {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 3},
    "qwen3_moe": {"head_dim": 16, "num_experts": 9, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 5,
        "sliding_window": 64,
        "rope_theta": 2e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
    },
    "gemma": {"head_dim": 16, "hidden_act": "gelu"},
    "granite": {"embedding_multiplier": 12, "logits_scaling": 8.0},
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64},
    "mixtral": {"num_local_experts": 3},
    "mistral": {"rope_theta": 1e6},
    "llama": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "deepseek_v2": {
        **{"num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 20, "num_experts_per_tok": 6},
        **{"rope_theta": 1e4, "rope_scaling": STRETCHED | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        **{"n_group": 1, "topk_group": 1, "scoring_func": "softmax", "moe_layer_freq": 1},
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 6, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_experts_per_tok": 8},
        **{"rope_theta": 1e4, "rope_scaling": STRETCHED | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    },
    "glm4_moe_lite": {"num_key_value_heads": 6, "first_k_dense_replace": 1, "rope_theta": 1e6},
}
