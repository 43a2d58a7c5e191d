"""Heads with random weights for a target with 8 layers, hidden size 32 and 64 tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from paceline.checkpoints.head_check import shapes_of
from paceline.checkpoints.loader import Loaded
from paceline.models.config import LayerConfig, ModelConfig, NormConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, HeadConfig, HeadFile, MedusaConfig
from paceline.testing.tiny import random_tensors
from paceline.text.tokenizer import Tokenizer

LAYER = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden=32,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    context_length=256,
    norms=NormConfig(1e-5),
    rope=RopeConfig(theta=50000.0),
)
QWEN = ModelConfig("qwen3", 64, 32, 2, 4, 2, 8, 48, 256, norms=NormConfig(heads="shared"), rope=RopeConfig(theta=1e6))

EAGLE3 = EagleConfig(LAYER, (2, 4, 5), 32, 16, norm_output=True, fc_norm=True)
EAGLE = EagleConfig(LAYER, ("final",), 32, 64, version=1)
MEDUSA = MedusaConfig(32, 64, 3, 2)
COMPACT = MedusaConfig(32, 64, 3, 1, shared=True, paths=((0,), (0, 0), (1,)))
BLOCK = BlockConfig(QWEN, (2, 5), 4, 63)
_PLAN = (LayerConfig(QWEN.rope, window=7), LayerConfig(QWEN.rope))
WINDOWED = replace(BLOCK, layer=replace(QWEN, special=_PLAN), causal=(True, False))
MUTUAL = replace(WINDOWED, causal=())
REDUCED = replace(BLOCK, draft_vocab=16, from_anchor=True)
DSPARK = replace(BLOCK, markov=8, confidence=40, from_anchor=True)
DFLASH2 = replace(BLOCK, conv=2, conv_group=16, selector=8, candidates=16)
EXIT = ExitConfig(32, 3, 4)
TARGET = replace(LAYER, layers=8, tied=True)


def loaded(seed: int = 0, dtype: torch.dtype = torch.float64, word: str = "w", noise: float = 0.0) -> Loaded:
    """Return a random target. Its tokens begin with `word`. `noise` is added to its embedding."""
    tensors = random_tensors(TARGET, seed)
    tensors["model.embed_tokens.weight"] += noise * torch.randn(64, 32, generator=torch.Generator().manual_seed(9))
    tokenizer = Tokenizer(Backend(WordLevel({f"{word}{i}": i for i in range(64)}, f"{word}0")))
    return Loaded(Decoder(TARGET, tensors, dtype, torch.device("cpu")), tokenizer, (), {}, Path("toy"))


def head_of(config: HeadConfig, dtype: torch.dtype = torch.float32, target: str | None = "owner/name") -> HeadFile:
    generator = torch.Generator().manual_seed(3)
    shapes, allowed = shapes_of(config)
    if "lm_head.weight" in allowed:
        shapes["lm_head.weight"] = allowed["lm_head.weight"]
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) * 0.3 for name, shape in shapes.items()}
    if isinstance(config, (EagleConfig, BlockConfig)) and 0 < config.draft_vocab < config.layer.vocab_size:
        tensors |= token_maps(torch.arange(config.draft_vocab) * 3 + 1, config.layer.vocab_size)
    if "token_map" in tensors:
        tensors["token_map"] = torch.arange(len(tensors["token_map"])) * 2
    extra = {"acceptance": {"code": 2.5, "chat": 2.0}, "coverage": 0.97}
    return HeadFile(Path("nowhere"), "", config, tensors, target, 8, extra)


def token_maps(tokens: Tensor, vocab: int) -> dict[str, Tensor]:
    marks = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marks}


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    """Write a folder in another project's format."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: x.clone() for name, x in tensors.items()}, path / file)
    else:
        torch.save(tensors, path / file)
    return path


# --- The configs of other projects, spelled as they write them

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


QWEN3 = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6}


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    verifier = {"name_or_path": "owner/name", "architectures": ["LlamaForCausalLM"]}
    layer = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "head_dim": 8,
    }
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": verifier},
        "transformer_layer_config": layer,
        **changes,
    }
