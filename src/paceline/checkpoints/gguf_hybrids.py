"""GGUF metadata of Granite, and of models with recurrent layers, in Hugging Face's terms; see `gguf.py`."""

from __future__ import annotations

from paceline.checkpoints.gguf_metadata import Config, Metadata, each_layer


def granite(meta: Metadata, config: Config) -> Config:
    keys = {"embedding_multiplier": "embedding", "residual_multiplier": "residual", "logits_scaling": "logit"}
    factors = {name: meta.get(f"{key}_scale", 1.0) for name, key in keys.items()}
    return {"model_type": "granite", "attention_multiplier": meta["attention.scale"], **factors}


def delta_net(meta: Metadata, config: Config) -> Config:
    """Qwen3-Next and Qwen3.5. The latter's heads are stored so that their keys follow each other
    (`MatrixConfig.tiled`)."""
    names = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
    layers, heads = config["num_hidden_layers"], meta["ssm.time_step_rank"]
    listed = meta.get("attention.recurrent_layers")
    every = meta.get("full_attention_interval", 4)
    recurrent = listed[:layers] if listed else [(i + 1) % every != 0 for i in range(layers)]
    experts = {
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
    }
    return {
        "model_type": names[meta.architecture],
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "partial_rotary_factor": meta.get("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "linear_num_key_heads": meta["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta["ssm.state_size"],
        "linear_value_head_dim": meta["ssm.inner_size"] // heads,
        "linear_conv_kernel_dim": meta["ssm.conv_kernel"],
        "linear_heads_tiled": meta.architecture != "qwen3next",
        **(experts if experts["num_experts"] else {}),
    }


def lfm2(meta: Metadata, config: Config) -> Config:
    """LFM2: layers without key heads do not attend."""
    attends = each_layer(meta, config, "attention.head_count_kv")
    experts = {
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
    }
    return {
        **(experts if meta.architecture == "lfm2moe" else {}),
        "model_type": "lfm2_moe" if meta.architecture == "lfm2moe" else "lfm2",
        "layer_types": ["full_attention" if one else "conv" for one in attends],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": meta["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }


def _mamba(meta: Metadata, prefix: str = "mamba_") -> Config:
    """The sizes of Mamba-2's states, as Bamba's configs name them."""
    heads = meta["ssm.time_step_rank"]
    names = {"n_heads": heads, "d_head": meta["ssm.inner_size"] // heads, "d_conv": meta["ssm.conv_kernel"]}
    names |= {"d_state": meta["ssm.state_size"], "n_groups": meta["ssm.group_count"]}
    return {prefix + name: size for name, size in names.items()}


def mamba2(meta: Metadata, config: Config) -> Config:
    sizes = _mamba(meta, "")
    return {
        **{"model_type": "mamba2", "num_heads": sizes["n_heads"], "head_dim": sizes["d_head"], "intermediate_size": 1},
        **{"n_groups": sizes["n_groups"], "state_size": sizes["d_state"], "conv_kernel": sizes["d_conv"]},
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def granite_hybrid(meta: Metadata, config: Config) -> Config:
    """Granite 4: layers without key heads do not attend."""
    attends = each_layer(meta, config, "attention.head_count_kv")
    return {
        **{**_mamba(meta), **granite(meta, config), "model_type": "granitemoehybrid"},
        "layer_types": ["attention" if one else "mamba" for one in attends],
        "num_local_experts": meta.get("expert_count", 0),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "shared_intermediate_size": meta.get("expert_shared_feed_forward_length") or config["intermediate_size"],
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else None,
    }


def falcon_h1(meta: Metadata, config: Config) -> Config:
    """Falcon-H1, whose factors are part of the tensors."""
    sizes = {**_mamba(meta), "mamba_d_ssm": meta["ssm.inner_size"]}
    return {"model_type": "falcon_h1", "mamba_norm_before_gate": False, **sizes}


def nemotron_h(meta: Metadata, config: Config) -> Config:
    """Nemotron-H: a layer attends if it has key heads, feeds if it has a width, or has a state."""
    feeds = "moe" if meta.architecture == "nemotron_h_moe" else "mlp"
    pairs = (each_layer(meta, config, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    sizes = _mamba(meta, "")
    return {
        **{"model_type": "nemotron_h", "mamba_num_heads": sizes["n_heads"], "mamba_head_dim": sizes["d_head"]},
        **{"n_groups": sizes["n_groups"], "ssm_state_size": sizes["d_state"], "conv_kernel": sizes["d_conv"]},
        "layers_block_type": [
            "attention" if kv else feeds if width else "mamba" for kv, width in zip(*pairs, strict=True)
        ],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "n_routed_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": meta.get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
        "n_group": meta.get("expert_group_count", 0) or 1,
        "moe_latent_size": meta.get("moe_latent_size") or None,
    }
