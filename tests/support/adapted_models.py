"""Tiny random transformers models, and the adapters that run them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.support.lazy import transformers

BASE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
HEADS = BASE | {"head_dim": 8}
OLD = {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
FULL = BASE | {"num_key_value_heads": 4}
# torch multiplies grouped experts only in dtypes of up to 32 bits.
MOE = HEADS | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
WINDOW = HEADS | {"sliding_window": 3}  # less than a draft's depth

TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", OLD),
    "GPT-J": ("GPTJ", OLD | {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoX", FULL),
    "OPT": ("OPT", FULL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Falcon": ("Falcon", FULL),
    "Phi": ("Phi", FULL),
    "Phi-3 with a window": ("Phi3", BASE | {"sliding_window": 3}),
    "StableLM": ("StableLm", BASE),
    "StarCoder2 with a window": ("Starcoder2", BASE | {"sliding_window": 3}),
    "Cohere": ("Cohere", BASE),
    "OLMo 2": ("Olmo2", BASE),
    "Granite": ("Granite", BASE),
    "GLM-4": ("Glm4", HEADS),
    "Qwen2-MoE": ("Qwen2Moe", MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16}),
    "Mixtral": ("Mixtral", MOE | {"num_local_experts": 4}),
    "Gemma 2, every other layer a window": ("Gemma2", WINDOW | {"query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3Text", WINDOW),
    "gpt-oss": ("GptOss", WINDOW | {"num_local_experts": 4, "experts_implementation": "eager"}),
}
CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bloom": ("Bloom", {"vocab_size": 37, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MPT": ("Mpt", {"vocab_size": 37, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "Falcon with ALiBi": ("Falcon", FULL | {"alibi": True}),
    "GPT-Neo, whose window counts columns": (
        "GPTNeo",
        FULL | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
}
ALL = TREES | CHAINS


def model_of(kind: str, sizes: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a random model with weights large enough for varied texts."""
    sizes = dict(sizes)
    experts = sizes.pop("experts_implementation", None)
    config = getattr(transformers, kind + "Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        mean, spread = (0.0, 0.35) if weight.dim() > 1 else (1.0, 0.2)
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * spread + mean)
    return model.to(dtype).eval()


def causal(model: Any) -> Any:
    """Return the adapter of a model."""
    from paceline.models.transformers import CausalLM

    transformers.logging.set_verbosity_error()
    return CausalLM(model)


@cache
def adapter(name: str) -> Any:
    """Return the adapter of a model in `ALL`. It has no state, so tests can share it."""
    return causal(model_of(*ALL[name]))
