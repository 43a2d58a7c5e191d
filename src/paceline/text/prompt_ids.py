"""Converts prompts of any form to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import InvalidPrompt
from paceline.text.tokenizer import Tokenizer
from paceline.types import Prompt


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, *, raw: bool = False) -> list[int]:
    """Convert a prompt to token ids.

    Args:
        prompt: Text, chat messages, or token ids [T].
        tokenizer: Tokenizer of the model.
        vocab_size: Number of tokens of the model.
        raw: True to encode a text without the chat template.

    Returns:
        The token ids, at least one.

    Raises:
        InvalidPrompt: If the prompt is empty or malformed.
    """
    tokens = _encode(prompt, tokenizer, raw)
    if not tokens:
        raise InvalidPrompt("the prompt is empty", "Give at least one token of text")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidPrompt(
                f"prompt token {token!r} is not a token id",
                f"Give ids from 0 to {vocab_size - 1}, or text, or chat messages",
            )
    return tokens


def _encode(prompt: Prompt, tokenizer: Tokenizer, raw: bool) -> list[int]:
    if isinstance(prompt, str):
        if not prompt or raw or tokenizer.chat_template is None:
            return tokenizer.encode(prompt) if prompt else []
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, (Tensor, np.ndarray)):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        kind = "None" if prompt is None else type(prompt).__name__
        raise InvalidPrompt(
            f"a prompt must be text, token ids [T] or chat messages, got {kind}", "Convert it to one of these"
        )
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.encode(tokenizer.apply_chat_template(items), special=False)
    return items
