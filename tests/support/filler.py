"""A toy model with fill-in-the-middle tokens."""

from __future__ import annotations

import tokenizers

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.text.tokenizer import Tokenizer
from tests.support.vocabularies import byte_level, speaker

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>")


def filler() -> LLM:
    """Return a random toy with fill-in-the-middle tokens."""
    words = byte_level()
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    backend.add_special_tokens(list(FIM))
    return LLM(speaker(Tokenizer(backend, words.special_tokens), seed=3), {"suffix": Suffix()})
