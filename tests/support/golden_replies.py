"""Greedy replies of transformers' `generate` with its logits processors, stored in tests/golden/replies.json.

`python -m tests.support.golden_replies` writes the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.model_config import read_config
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.testing import random_tensors

FILE = Path(__file__).parents[1] / "golden" / "replies.json"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "pad_token_id": 0,
}
PROMPTS = ([1, 2, 3, 20, 9], [20, 21, 20, 21, 20])
TOKENS = 48
KNOBS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.4},
    "n-gram": {"no_repeat_ngram_size": 2},
    "words": {"bad_words": [[3], [11], [20, 21], [52, 3, 9]]},
    "length": {"min_new_tokens": 30},
    "bias": {"logit_bias": {4: 3.5, 30: -8.0}},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words": [[3], [20, 21]],
        "min_new_tokens": 25,
    },
}


def _config() -> ModelConfig:
    return read_config(CONFIG)


def _tensors() -> dict[str, torch.Tensor]:
    return random_tensors(_config(), seed=3, scale=0.3)


@cache
def decoder(dtype: torch.dtype) -> Decoder:
    """Return the native decoder of the model."""
    return Decoder(_config(), _tensors(), dtype, torch.device("cpu"))


@cache
def replies() -> dict[str, list[list[int]]]:
    """Return name of the settings -> the reply to each prompt."""
    found: dict[str, list[list[int]]] = json.loads(FILE.read_text())
    return found


@torch.inference_mode()
def made(dtype: torch.dtype) -> dict[str, list[list[int]]]:
    """Compute `replies` with transformers."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval().to(dtype)
    model.load_state_dict(_tensors())

    def reply(prompt: list[int], knobs: dict[str, Any]) -> list[int]:
        told = dict(knobs)
        if words := told.pop("bad_words", None):
            told["bad_words_ids"] = words
        if bias := told.pop("logit_bias", None):
            told["sequence_bias"] = [[[token], by] for token, by in bias.items()]
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **told)
        ended: list[int] = out[0, len(prompt) :].tolist()
        return ended

    return {name: [reply(prompt, knobs) for prompt in PROMPTS] for name, knobs in KNOBS.items()}


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in made(torch.float64).items()]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
