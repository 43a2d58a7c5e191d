"""Tokens of a model as text and bytes, in the shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0
"""OpenAI's value for a log-probability of minus infinity, which JSON cannot express."""


class TokenTexts:
    """Tokens of a model as text and bytes, in the shapes of OpenAI's API."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _names(self) -> dict[int, str]:
        return {index: name for name, index in self._tokenizer.vocabulary.items()}

    def bytes(self, token: int) -> bytes:
        """Return a token's bytes: a special token's name; nothing for an unused row of the vocabulary."""
        found = self._tokenizer.token_bytes.get(token)
        return self._names.get(token, "").encode(errors="replace") if found is None else found

    def text(self, token: int) -> str:
        """Return a token's bytes as text."""
        return self.bytes(token).decode(errors="replace")

    def chat_logprobs(self, chunk: Chunk) -> dict[str, Any]:
        """Return one token's log-probabilities in the shape of chats."""
        logprobs = logprobs_of(chunk)
        top = [self._entry(token, logprob) for token, logprob in logprobs.top]
        return {**self._entry(chunk.token_id, logprobs.chosen), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(self.bytes(token))}

    def text_logprobs(self, chunks: Sequence[Chunk], offset: int) -> dict[str, Any]:
        """Return log-probabilities in the shape of completions, null for a prompt's first token.

        `offset`: characters of the text before them.
        """
        offsets = []
        for chunk in chunks:
            offsets.append(offset)
            offset += len(chunk.text)
        return {
            "tokens": [self.text(chunk.token_id) for chunk in chunks],
            "token_logprobs": [chunk.logprobs and max(chunk.logprobs.chosen, _MIN_LOGPROB) for chunk in chunks],
            "top_logprobs": [self._top(chunk) for chunk in chunks],
            "text_offset": offsets,
        }

    def _top(self, chunk: Chunk) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one."""
        if not chunk.logprobs or not chunk.logprobs.top:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*chunk.logprobs.top, (chunk.token_id, chunk.logprobs.chosen)):
            found.setdefault(self.text(token), max(logprob, _MIN_LOGPROB))
        return found


def logprobs_of(chunk: Chunk) -> Logprobs:
    """Return the log-probabilities of a token that was generated with them."""
    assert chunk.logprobs is not None
    return chunk.logprobs
