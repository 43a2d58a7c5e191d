"""/v1/completions: text as it is, without a chat template; one prompt or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.engine.detokenizer import Chunk, Detokenizer
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.llm import LLM
from paceline.server.api import Api, Event
from paceline.server.apis.choices import Choice, ChoicesEncoder
from paceline.server.compat import RAW, accepts, only
from paceline.server.errors import WrongParameter
from paceline.server.prepare import Prepared
from paceline.server.replies import Usage
from paceline.server.request import GenerateRequest, TextPrompt
from paceline.server.schema import RequestBody, Text, TokenIds, TopLogprobs
from paceline.server.worker import ReplyRound
from paceline.text.sandbox import ABANDONED, Unfinished

_DEFAULT_LENGTH = 16
"""Default maximum tokens, as in OpenAI's API."""


@accepts(
    RAW,
    only((True,), "add_special_tokens", "send token ids for a prompt without BOS"),
    only((), "prompt_embeds", "a prompt is text or token ids"),
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
        """Every prompt."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else [*self.prompt]  # type: ignore[list-item]

    @property
    def samples(self) -> int:
        """Replies to generate for each prompt."""
        return self.best_of or self.n or 1

    @property
    def ranked(self) -> bool:
        """True if only the likeliest replies are returned."""
        return self.samples > (self.n or 1)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.samples < (self.n or 1):
            raise WrongParameter(f"best_of must be >= n, got {self.best_of} with n={self.n}", "best_of")
        if self.ranked and (self.stream or self.echo):
            raise WrongParameter(
                "best_of beyond n cannot be combined with stream or echo: the best is known at the end", "best_of"
            )
        if self.suffix and self.echo and self.logprobs is not None:
            raise WrongParameter("suffix cannot be combined with echo and logprobs", "suffix")
        return self


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
    """The likeliest of several completions: the ones with the highest mean log-probability per token."""

    def __init__(
        self, head: Mapping[str, Any], kinds: tuple[str, str], choices: Sequence[TextChoice], samples: int, n: int
    ) -> None:
        """Make an encoder.

        Args:
            head: See `ChoicesEncoder`.
            kinds: See `ChoicesEncoder`.
            choices: All replies.
            samples: Replies that are generated for each prompt.
            n: Replies that are returned for each prompt.
        """
        super().__init__(head, kinds, choices, usage=False)
        self._samples, self._n = samples, n
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
        """Return the request of one or several texts."""
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

    def encoder(self, body: CompletionRequest, prepared: Prepared) -> ChoicesEncoder:
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
        head, kinds = {"id": prepared.id, "model": prepared.model.name}, ("text_completion", "text_completion")
        if body.ranked:
            return BestOfEncoder(head, kinds, choices, n, body.n or 1)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return ChoicesEncoder(head, kinds, choices, usage, bool(body.return_progress))


def _echoes(body: CompletionRequest, prepared: Prepared) -> list[tuple[str, ScoredPrompt | None]]:
    """Return each prompt as text. If log-probabilities were requested, add them, and let a job collect them."""
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
