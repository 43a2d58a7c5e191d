"""A whole toy LLM: 37 characters, a chat template, a float64 decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.llm import LLM
from paceline.protocols import Target
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.testing import tiny_target
from paceline.text.tokenizer import Tokenizer
from paceline.types import DraftBudget


def ask_for(slot: int, budget: DraftBudget, sampling: Sampling, token_ids: Sequence[int]) -> Ask:
    """Return an engine's request to a drafter for this text."""
    return Ask(slot, Prefix(token_ids, (), len(token_ids)), budget, sampling.sampler())


ALPHABET = "abcdefghijklmnopqrstuvwxyz .,!?:\n<>'"
PROMPT = [7, 4, 11, 11, 14, 26, 3]
"""Some tokens of the alphabet."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<a:{% endif %}"
)


def toy_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """One token per character; the last id is the end of a sequence."""
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"</s>": len(alphabet)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, TEMPLATE)


def loaded(target: Target, generation: dict[str, Any] | None = None) -> Loaded:
    """A target as a loaded model of the toy tokenizer."""
    return Loaded(target, toy_tokenizer(), (36,), generation or {}, Path("toy"))


def toy_model(generation: dict[str, Any] | None = None, layers: int = 1, **changes: int) -> Loaded:
    """A toy of one layer, which takes two thirds of the time of two."""
    return loaded(tiny_target(layers=layers, **changes), generation)


def toy_foreigner(layers: int = 1, **changes: int) -> Loaded:
    """A toy whose tokens are the same letters under other numbers."""
    return Loaded(tiny_target(layers=layers, **changes), toy_tokenizer(ALPHABET[::-1]), (36,), {}, Path("foreign"))


def toy_llm(drafter: Drafter | None = None, draft: DraftBudget | None = None, **changes: int) -> LLM:
    return LLM(toy_model(**changes), drafter, draft)
