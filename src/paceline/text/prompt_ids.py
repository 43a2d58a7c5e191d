"""From a prompt, in any of its forms, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import InvalidPrompt
from paceline.text.tokenizer import Tokenizer
from paceline.types import Prompt


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int, *, raw: bool = False) -> list[int]:
    """Return the ids of text, chat messages or ids [T], at least one. `raw`: take text as it is, without the chat
    template. Raises `InvalidPrompt` for an empty or malformed prompt."""
    tokens = _encode(prompt, tokenizer, raw)
    if not tokens:
        raise InvalidPrompt("the prompt is empty", "Give at least one token of text")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidPrompt(
                f"prompt token {token!r} is not a token id",
                f"Give ids from 0 to {vocab_size - 1}, or text, or messages",
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
        raise InvalidPrompt(f"a prompt cannot be {_a(prompt)}", "Give text, token ids [T] or chat messages")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.encode(tokenizer.apply_chat_template(items), special=False)
    return items


def _a(thing: object) -> str:
    """The name of the thing's type with its article."""
    name = "None" if thing is None else type(thing).__name__
    return name if thing is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
