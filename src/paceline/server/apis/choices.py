"""Choices: the replies of OpenAI's chat completions and completions, as they grow."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.api import Encoder, Event
from paceline.server.replies import TokenTexts, Usage, logprobs_of
from paceline.server.worker import FINISH_REASONS, ReplyRound


@dataclass(slots=True, kw_only=True)
class Choice(ABC):
    """One reply in OpenAI's shape, as it grows.

    Attributes:
        index: The position among the choices.
        token_texts: Texts of the model's tokens.
        logprobs: True if the client requested log-probabilities.
        trace: True if the client requested the trace of the rounds.
        text: The text so far.
        traced: The trace so far.
        finish_reason: OpenAI's finish reason, once the reply has ended.
    """

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
            events.append({**self.event(), "finish_reason": self.finish_reason})
        return events

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return the whole reply so far."""

    @abstractmethod
    def event(self) -> dict[str, Any]:
        """Return an event without content."""

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
                "p": round(math.exp(logprobs_of(chunk).chosen), 6),
                "drafter": round_.drafter if chunk.drafted else None,
            }
            for chunk in round_.chunks
        ]
        self.traced += tokens
        counts = {"drafted": round_.drafted, "accepted": round_.accepted, "ms": round(round_.ms, 3)}
        return {"trace": tokens, "round": counts}

    def _all_traced(self) -> dict[str, Any]:
        return {"trace": self.traced} if self.trace else {}


class ChoicesEncoder(Encoder):
    """The choices of a chat completion or a completion."""

    last = b"data: [DONE]\n\n"

    def __init__(
        self,
        head: Mapping[str, Any],
        kinds: tuple[str, str],
        choices: Sequence[Choice],
        usage: bool,
        progress: bool = False,
    ) -> None:
        """Make an encoder.

        Args:
            head: Keys of every object of the answer.
            kinds: Object types of the whole answer and of its pieces.
            choices: The choices.
            usage: True if a stream ends with the usage.
            progress: True if a stream reports how much of the prompt has been read.
        """
        self._head = {**head, "created": int(time.time())}
        self._document, self._event = kinds
        self._choices, self._usage, self.shows_progress = choices, usage, progress

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
        return self._chunks([growing[0].event()])[0]

    def progress(self, usage: Usage) -> Event:
        """Return llama.cpp's event."""
        return {**self.heartbeat(), "prompt_progress": usage.prompt_progress()}

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
