"""How tokens are told to clients: their text and bytes, their log-probabilities, how they came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.server.running import ReplyRound
from paceline.text.tokenizer import Tokenizer

_NEVER = -9999.0
"""What OpenAI reports for a log-probability of minus infinity, which JSON has no number for."""


class TokenTexts:
    """The tokens of a model by what they add to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _names(self) -> dict[int, str]:
        return {index: name for name, index in self._tokenizer.vocabulary.items()}

    def bytes(self, token: int) -> bytes:
        """Of a special token its name; of a row that no token belongs to, nothing."""
        said = self._tokenizer.token_bytes.get(token)
        return self._names.get(token, "").encode(errors="replace") if said is None else said

    def text(self, token: int) -> str:
        return self.bytes(token).decode(errors="replace")

    def chat_logprobs(self, chunk: Chunk) -> dict[str, Any]:
        """One token in the shape of chats."""
        said = _said(chunk)
        top = [self._entry(token, logprob) for token, logprob in said.top]
        return {**self._entry(chunk.token_id, said.chosen), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(self.bytes(token))}

    def text_logprobs(self, chunks: Sequence[Chunk], offset: int) -> dict[str, Any]:
        """Tokens in the shape of completions; null for a prompt's first, which nothing predicts. `offset`: characters
        of the text before them."""
        offsets = []
        for chunk in chunks:
            offsets.append(offset)
            offset += len(chunk.text)
        return {
            "tokens": [self.text(chunk.token_id) for chunk in chunks],
            "token_logprobs": [chunk.logprobs and _finite(chunk.logprobs.chosen) for chunk in chunks],
            "top_logprobs": [self._tops(chunk) for chunk in chunks],
            "text_offset": offsets,
        }

    def _tops(self, chunk: Chunk) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one."""
        said = chunk.logprobs
        if not said or not said.top:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*said.top, (chunk.token_id, said.chosen)):
            found.setdefault(self.text(token), _finite(logprob))
        return found

    def trace(self, round_: ReplyRound) -> dict[str, Any]:
        """How each token of a round came about; `p`: its probability as the model holds it."""
        tokens = [
            {
                "text": chunk.text,
                "id": chunk.token_id,
                "origin": chunk.origin,
                "p": round(math.exp(_said(chunk).chosen), 6),
                "drafter": round_.drafter if chunk.origin == "draft" else None,
            }
            for chunk in round_.chunks
        ]
        return {"trace": tokens, "round": round_.as_dict()}


def _said(chunk: Chunk) -> Logprobs:
    assert chunk.logprobs is not None
    return chunk.logprobs


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)
