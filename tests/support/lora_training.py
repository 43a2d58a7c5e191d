"""Adapters with random weights for a tiny Llama, written by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tests.support.lazy import peft, transformers

SIZES = {
    "vocab_size": 27,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model(path: Path, *, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """Create a tiny Llama with biases and save it to `path`."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(SIZES | {"attention_bias": True} | changes), tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(path)
    save_tokenizer(path)
    return model


def save_tokenizer(path: Path) -> None:
    Backend(models.BPE(vocab={chr(97 + i): i for i in range(27)}, merges=[])).save(str(path / "tokenizer.json"))


def train(model: Any, path: Path, **options: Any) -> Any:
    """Save an adapter with random trained tensors to `path`. Return the model with the adapter."""
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.1, 0.3)
    adapted.save_pretrained(path)
    return adapted


VARIANTS: dict[str, dict[str, Any]] = {
    "a list of modules": {"target_modules": ATTENTION, "r": 4, "lora_alpha": 10},
    "all linear, rank-stabilised": {"target_modules": "all-linear", "r": 4, "use_rslora": True},
    "a regex with patterns": {
        "target_modules": r".*\.1\.(mlp\.\w+_proj|self_attn\.q_proj)",
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"down_proj": 5, "mlp.*": 3},
        "alpha_pattern": {r"self_attn\.q_proj": 7, "^model.layers.1.mlp.up_proj": 1},
    },
    "weight-decomposed": {"target_modules": [*ATTENTION, "down_proj", "embed_tokens"], "r": 4, "use_dora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "r": 3},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "trained biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["q_proj"], "bias": "all"},
    "biases of its own": {"target_modules": ["q_proj", "o_proj"], "lora_bias": True, "lora_alpha": 3},
}
