"""A whole toy LLM: 37 characters, a chat template, a random decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.engine import engine
from paceline.kernels.cpu.build import library
from paceline.llm import LLM
from paceline.models.decoder import Decoder
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
"""A prompt of letters."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<a:{% endif %}"
)


def toy_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """Return a tokenizer with one token per character. The last id is the end of a sequence."""
    vocabulary = {letter: i for i, letter in enumerate(alphabet)} | {"</s>": len(alphabet)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, TEMPLATE)


@cache
def toy_dtype() -> torch.dtype:
    """Return float32 with the CPU kernels: one call runs all layers, and a row has the same bits in any pass.

    Return float64 without kernels, so that rounding does not matter.
    """
    return torch.float64 if library() is None else torch.float32


def toy_target(seed: int = 0, **changes: int | bool) -> Decoder:
    """Return a `tiny_target` that takes a third of the time, for tests that compare texts and not numbers."""
    target = tiny_target(seed, toy_dtype(), **changes)
    target.toy = (seed, *sorted(changes.items()))  # type: ignore[attr-defined]
    return target


def _once_per_toy(check: Callable[..., Any]) -> Callable[..., Any]:
    """Run a check only once for equal toys, because it takes three quarters of the time of a first reply."""
    found: dict[object, Any] = {}

    def checked(target: Target, *more: Any) -> Any:
        if not hasattr(target, "toy") or "forward" in vars(target):
            return check(target, *more)
        key = target.toy, type(target), library(), torch.get_num_threads(), *more
        if key not in found:
            found[key] = check(target, *more)
        return found[key]

    return checked


engine.guarantee, engine.chunk_invariant = map(_once_per_toy, (engine.guarantee, engine.chunk_invariant))  # type: ignore[assignment]


def loaded(target: Target, generation: dict[str, Any] | None = None) -> Loaded:
    """Return a target as a loaded model with the toy tokenizer."""
    return Loaded(target, toy_tokenizer(), (36,), generation or {}, Path("toy"))


def toy_model(generation: dict[str, Any] | None = None, layers: int = 1, **changes: int) -> Loaded:
    return loaded(toy_target(layers=layers, **changes), generation)


def toy_foreigner(layers: int = 1, **changes: int) -> Loaded:
    """Return a toy with the same letters as tokens, but with other ids."""
    return Loaded(toy_target(layers=layers, **changes), toy_tokenizer(ALPHABET[::-1]), (36,), {}, Path("foreign"))


def toy_llm(drafter: Drafter | None = None, draft: DraftBudget | None = None, **changes: int) -> LLM:
    return LLM(toy_model(**changes), drafter, draft)
