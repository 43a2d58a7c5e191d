"""Models with a given shape and random weights, and drafts with a given acceptance rate."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.model_config import read_config
from paceline.models.config import ModelConfig
from paceline.protocols import KVCache, Target
from paceline.testing import tensor_shapes
from paceline.types import Forward, Rows, Want

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
SHAPES = {"llama-8b": LLAMA_8B, "qwen2.5-7b": QWEN_7B}


def tiny(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same architecture, small enough for a test on a CPU."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "max_window_layers": 2}
    return {**shape, **{key: value for key, value in (sizes | heads).items() if key in shape}}


class RandomWeights(Mapping[str, Tensor]):
    """Normally distributed weights, created on the device on demand and always the same. Norm weights are 1."""

    def __init__(self, raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.config: ModelConfig = read_config(raw)
        self._dtype, self._device = dtype, device
        self.shapes = tensor_shapes(self.config)
        if raw["model_type"] == "qwen2":
            wide = {name: shape for name, shape in self.shapes.items() if name.split(".")[-2] in BIASED}
            self.shapes |= {name.removesuffix("weight") + "bias": shape[:1] for name, shape in wide.items()}

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def read_bytes(self, context: int) -> int:
        """Return the bytes that a small pass reads after `context` tokens: cache and matrices without embeddings."""
        c = self.config
        numbers = sum(torch.Size(s).numel() for name, s in self.shapes.items() if "embed_tokens" not in name or c.tied)
        return (numbers + 2 * c.layers * c.kv_heads * c.head_dim * context) * self._dtype.itemsize


BIASED = ("q_proj", "k_proj", "v_proj")


class Steered:
    """A target that always chooses the next token of `text`.

    A pass adds one or two kernels to the target's pass. A drafter that knows the text is then right exactly as often as
    intended, even if random weights produce many ties.
    """

    def __init__(self, target: Target, text: Sequence[int]) -> None:
        self._target = target
        self.vocab_size, self.context_length, self.device = target.vocab_size, target.context_length, target.device
        self._next = torch.tensor([*text[1:], *text[:1]], device=target.device)

    def new_cache(self) -> KVCache:
        return self._target.new_cache()

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        out = self._target.forward(rows, cache, want)
        if want.logits == "all":
            positions = rows.positions[:, : out.logits.shape[1]]  # padding may have no logits
            chosen = self._next[positions.clamp(max=len(self._next) - 1)]
            out.logits.scatter_(2, chosen[..., None], 1e4)
        return out


def accuracy_for(tau: float, length: int) -> float:
    """Return the accuracy per token at which a chain of `length` yields `tau` tokens per round, including the target's
    own token: the root a of 1 + a + a^2 + ... + a^length = tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tau else (low, middle)
    return (low + high) / 2
