"""Replies as clients see them: tokens with their log-probabilities and origins, choices that grow."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.server.errors import ApiError
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, Writer
from paceline.text.tokenizer import Tokenizer

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
"""The engine's finish reasons -> OpenAI's."""
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
        logprobs = _logprobs(chunk)
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


def _logprobs(chunk: Chunk) -> Logprobs:
    assert chunk.logprobs is not None
    return chunk.logprobs


@dataclass(slots=True, kw_only=True)
class Choice(ABC):
    """One reply in OpenAI's shape, as it grows. `logprobs`, `trace`: whether the client requested them."""

    index: int
    token_texts: TokenTexts
    logprobs: bool = False
    trace: bool = False
    text: str = ""
    traced: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return 0

    @abstractmethod
    def first_event(self) -> dict[str, Any] | None:
        """Return the first event of a stream, if there is something to send before the first round."""

    def add_round(self, round_: ReplyRound) -> list[dict[str, Any]]:
        """Add a round and return its events. The one with the finish reason has no other content."""
        events = self._events(round_)
        if reason := round_.chunks[-1].finish_reason:
            self.finish_reason = self._finish(reason)
            events.append({**self._event(), "finish_reason": self.finish_reason})
        return events

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the whole reply so far."""

    def empty_event(self) -> dict[str, Any]:
        """Return an event without content."""
        return self._event()

    @abstractmethod
    def _event(self) -> dict[str, Any]:
        """An event without content."""

    @abstractmethod
    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        """Add a round's content and return its events."""

    def _finish(self, reason: str) -> str:
        return FINISH_REASONS.get(reason, reason)

    def _trace(self, round_: ReplyRound) -> dict[str, Any]:
        """Trace a round if that was requested. `p`: each token's probability under the model."""
        if not self.trace:
            return {}
        tokens = [
            {
                "text": chunk.text,
                "id": chunk.token_id,
                "origin": chunk.origin,
                "p": round(math.exp(_logprobs(chunk).chosen), 6),
                "drafter": round_.drafter if chunk.drafted else None,
            }
            for chunk in round_.chunks
        ]
        self.traced += tokens
        counts = {"drafted": round_.drafted, "accepted": round_.accepted, "ms": round(round_.ms, 3)}
        return {"trace": tokens, "round": counts}

    def _all_traced(self) -> dict[str, Any]:
        return {"trace": self.traced} if self.trace else {}


class ChoicesWriter(Writer):
    """The choices of a chat completion or a completion. `document`, `event`: object types of the answer, whole or in
    pieces. `usage`: whether a stream ends with the usage.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, head: Mapping[str, Any], kinds: tuple[str, str], choices: Sequence[Choice], usage: bool) -> None:
        self._head = {**head, "created": int(time.time())}
        self._document, self._event = kinds
        self._choices, self._usage = choices, usage

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _chunks(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        more: dict[str, Any] = {"usage": None} if self._usage else {}
        return [self._object(self._event, [event], **more) for event in events]

    def begin(self, usage: Usage) -> list[Event]:
        """Return the first event of each choice that has one."""
        return self._chunks(event for choice in self._choices if (event := choice.first_event()))

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round to its choice."""
        return self._chunks(self._choices[round_.index].add_round(round_))

    def heartbeat(self) -> Event:
        """Return an event without content, of the first choice that may still grow."""
        growing = [choice for choice in self._choices if choice.finish_reason is None] or self._choices
        return self._chunks([growing[0].empty_event()])[0]

    def end(self, usage: Usage) -> list[Event]:
        """Return the usage, if it was requested."""
        return [self._object(self._event, [], **self._counts(usage))] if self._usage else []

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the finished object."""
        choices = [choice.as_dict() for choice in self._choices]
        return self._object(self._document, choices, **self._counts(usage))

    def _counts(self, usage: Usage) -> dict[str, Any]:
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return {"usage": usage.openai(reasoning), "metrics": usage.vllm()}

    def failed(self, error: ApiError) -> Event:
        """Return OpenAI's error."""
        return error.body
