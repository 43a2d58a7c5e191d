"""/v1/completions: continuing one or many texts without a chat template. Also the base classes of chat completions."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.engine.detokenizer import Chunk, Detokenizer
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.llm import LLM
from paceline.server.api import Api, Encoder, Event
from paceline.server.compat import NO_REASONING, accepted_values, accepts
from paceline.server.errors import WrongParameter
from paceline.server.prepare import PreparedRequest
from paceline.server.replies import TokenTexts, Usage, logprobs_of
from paceline.server.request import GenerateRequest, TextPrompt
from paceline.server.schema import RequestBody, Text, TokenIds, TopLogprobs
from paceline.server.worker import FINISH_REASONS, ReplyRound
from paceline.text.sandbox import ABANDONED, Unfinished

_DEFAULT_LENGTH = 16
"""Default maximum tokens, as in OpenAI's API."""
_KINDS = "text_completion", "text_completion"
"""Values of `object` in a whole answer, and in an event of a stream."""


@accepts(
    NO_REASONING,
    accepted_values((True,), "add_special_tokens", "send token ids for a prompt without BOS"),
    accepted_values((), "prompt_embeds", "a prompt is text or token ids"),
)
class CompletionRequest(RequestBody):
    """Body of /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None
    suffix: Annotated[Text | None, Field(description="Text after the gap that the reply fills.")] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else [*self.prompt]  # type: ignore[list-item]

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def ranked(self) -> bool:
        """True if only the most likely replies are returned."""
        return self.samples > (self.n or 1)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.samples < (self.n or 1):
            raise WrongParameter(f"best_of must be >= n, got {self.best_of} with n={self.n}", "best_of")
        if self.ranked and (self.stream or self.echo):
            raise WrongParameter(
                "best_of > n cannot be combined with stream or echo: the best reply is only known at the end", "best_of"
            )
        if self.suffix and self.echo and self.logprobs is not None:
            raise WrongParameter("suffix cannot be combined with echo and logprobs", "suffix")
        return self


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
        """Add a round and return its events. The event with the finish reason has no other content."""
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
        self, body: RequestBody, prepared: PreparedRequest, kinds: tuple[str, str], choices: Sequence[Choice]
    ) -> None:
        """Make an encoder. `kinds`: values of `object` in a whole answer, and in an event of a stream."""
        self._head = {"id": prepared.id, "model": prepared.model.name, "created": int(time.time())}
        self._document, self._event = kinds
        self._choices, self.shows_progress = choices, bool(body.return_progress)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        """True if a stream ends with the usage."""

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _chunks(self, events: Iterable[dict[str, Any]]) -> list[Event]:
        more: dict[str, Any] = {"usage": None} if self._usage else {}
        return [self._object(self._event, [event], **more) for event in events]

    def begin(self, usage: Usage) -> list[Event]:
        """Return the first event of each choice that has one."""
        return self._chunks(event for choice in self._choices if (event := choice.first_event()))

    def add(self, round_: ReplyRound) -> list[Event]:
        return self._chunks(self._choices[round_.index].add_round(round_))

    def heartbeat(self) -> Event:
        """Return an event without content, of the first choice that may still grow."""
        growing = [choice for choice in self._choices if choice.finish_reason is None] or self._choices
        return self._chunks([growing[0].event()])[0]

    def progress(self, usage: Usage) -> Event:
        """Return an event with llama.cpp's `prompt_progress`."""
        return {**self.heartbeat(), "prompt_progress": usage.prompt_progress()}

    def end(self, usage: Usage) -> list[Event]:
        """Return the usage, if it was requested."""
        return [self._object(self._event, [], **self._counts(usage))] if self._usage else []

    def document(self, usage: Usage) -> dict[str, Any]:
        choices = [choice.as_dict() for choice in self._choices]
        return self._object(self._document, choices, **self._counts(usage))

    def _counts(self, usage: Usage) -> dict[str, Any]:
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return {"usage": usage.openai(reasoning), "metrics": usage.vllm()}


ScoredPrompt = Callable[[], list[Chunk]]
"""Returns a prompt's tokens with their log-probabilities, which are known once the reply has begun."""


@dataclass(slots=True, kw_only=True)
class TextChoice(Choice):
    """A choice of a text completion.

    Attributes:
        echo: The prompt, if it is shown before the reply.
        scored: Returns the prompt with its log-probabilities, if they were requested.
        prompt_only: True if the reply's tokens are not shown.
        chunks: Tokens with log-probabilities so far.
    """

    echo: str = ""
    scored: ScoredPrompt | None = None
    prompt_only: bool = False
    chunks: list[Chunk] = field(default_factory=list)

    def first_event(self) -> dict[str, Any] | None:
        """Return the event with the echo, unless the echo waits for its log-probabilities."""
        return self.event(self.echo) if self.echo and not self.scored else None

    def as_dict(self) -> dict[str, Any]:
        """Return a choice of a `text_completion`."""
        choice = {**self.event(self.echo + self.text), "finish_reason": self.finish_reason}
        if self.logprobs:
            choice["logprobs"] = self.token_texts.text_logprobs(self.chunks, 0)
        return choice | self._all_traced()

    def event(self, text: str = "") -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}

    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        events = []
        if self.scored:
            self.chunks, self.scored = self.scored(), None
            events.append({**self.event(self.echo), "logprobs": self.token_texts.text_logprobs(self.chunks, 0)})
        if self.prompt_only:
            return events
        event = self.event(round_.text) | self._trace(round_)
        if self.logprobs:
            event["logprobs"] = self.token_texts.text_logprobs(round_.chunks, len(self.echo) + len(self.text))
            self.chunks += round_.chunks
        self.text += event["text"]
        return [*events, event] if event["text"] or self.logprobs or self.trace else events

    def _finish(self, reason: str) -> str:
        return "length" if self.prompt_only else Choice._finish(self, reason)


class BestOfEncoder(ChoicesEncoder):
    """The most likely of several completions: the ones with the highest mean log-probability per token."""

    def __init__(self, body: CompletionRequest, prepared: PreparedRequest, choices: Sequence[TextChoice]) -> None:
        super().__init__(body, prepared, _KINDS, choices)
        self._samples, self._n = body.samples, body.n or 1
        self._sums = [0.0] * len(choices)
        self._counts_of = [0] * len(choices)

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round to its choice, and to its score."""
        self._sums[round_.index] += sum(chunk.logprobs.chosen for chunk in round_.chunks if chunk.logprobs)
        self._counts_of[round_.index] += len(round_.chunks)
        return super().add(round_)

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the finished object with the best replies to each prompt."""
        whole = super().document(usage)
        kept = []
        for first in range(0, len(self._sums), self._samples):
            group = range(first, first + self._samples)
            kept += sorted(group, key=lambda i: -self._sums[i] / max(1, self._counts_of[i]))[: self._n]
        choices = [{**whole["choices"][i], "index": index} for index, i in enumerate(kept)]
        return {**whole, "choices": choices}


class Completions(Api[CompletionRequest]):
    """OpenAI's completions."""

    path = "/v1/completions"
    body = CompletionRequest
    id_prefix = "cmpl-"
    about = "Continue a text."

    def decode(self, body: CompletionRequest) -> GenerateRequest:
        logprobs = 0 if (body.ranked or body.trace) and body.logprobs is None else body.logprobs
        return GenerateRequest(
            prompt=TextPrompt(texts=body.prompts, after=body.suffix or None, ends=not body.ignore_eos),
            sampling=body.sampling,
            constraints=body.constraints(),
            max_tokens=_DEFAULT_LENGTH if body.length is None else body.length,
            samples=body.samples,
            logprobs=logprobs,
            speculation=body.speculation,
        )

    def encoder(self, body: CompletionRequest, prepared: PreparedRequest) -> ChoicesEncoder:
        """Return the encoder of the choices, with the prompts if they are to be echoed."""
        echoes = _echoes(body, prepared) if body.echo else [("", None)] * len(body.prompts)
        n = body.samples
        choices = [
            TextChoice(
                index=index,
                token_texts=prepared.model.token_texts,
                logprobs=body.logprobs is not None,
                trace=bool(body.trace),
                echo=echoes[index // n][0],
                scored=echoes[index // n][1],
                prompt_only=job.prompt_only,
            )
            for index, job in enumerate(prepared.jobs)
        ]
        if body.ranked:
            return BestOfEncoder(body, prepared, choices)
        return ChoicesEncoder(body, prepared, _KINDS, choices)


def _echoes(body: CompletionRequest, prepared: PreparedRequest) -> list[tuple[str, ScoredPrompt | None]]:
    """Return the text of each prompt. If log-probabilities were requested, let the prompt's first job collect them, and
    also return a function that returns them."""
    llm, n = prepared.model.llm, body.samples
    found: list[tuple[str, ScoredPrompt | None]] = []
    for i, prompt in enumerate(body.prompts):
        if body.logprobs is None:
            found.append((prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt), None))
            continue
        scores, job = PromptLogprobs(body.logprobs), prepared.jobs[i * n]
        prepared.jobs[i * n] = replace(job, scores=scores)  # one reply's scores serve all samples of its prompt
        pieces = _pieces(llm, prompt, job.tokens)
        found.append(("".join(pieces), partial(_scored_chunks, job.tokens, pieces, scores)))
    return found


def _scored_chunks(tokens: Sequence[int], pieces: Sequence[str], scores: PromptLogprobs) -> list[Chunk]:
    return [
        Chunk(piece, token, "plain", None, logprobs)
        for piece, token, logprobs in zip(pieces, tokens, scores.tokens[: len(tokens)], strict=True)
    ]


def _pieces(llm: LLM, prompt: str | list[int], tokens: Sequence[int]) -> list[str]:
    """Return each token's part of the echoed text. Raises `Unfinished` when the client has left."""
    if isinstance(prompt, str):
        return [prompt[start:end] for start, end in pairwise([*llm.tokenizer.starts(prompt), len(prompt)])]
    detokenizer, abandoned = Detokenizer(llm.tokenizer.decode), ABANDONED.get()
    pieces = []
    for token in tokens:
        if abandoned and abandoned.is_set():
            raise Unfinished
        pieces.append(detokenizer.push(token))
    return [*pieces[:-1], pieces[-1] + detokenizer.flush()]
