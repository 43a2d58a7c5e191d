"""/v1/completions: text as it is, without a chat template; one prompt or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.engine.detokenizer import Chunk, Detokenizer
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.server import options
from paceline.server.chat import FINISH
from paceline.server.errors import bad_request
from paceline.server.grammar_trials import Trials
from paceline.server.limits import Settings
from paceline.server.running import ReplyRound, RequestPlan
from paceline.server.schema import CompletionRequest
from paceline.server.token_text import TokenTexts
from paceline.text.sandbox import ABANDONED, Unfinished

_LENGTH = 16
"""Tokens of a completion that does not say how many, as in OpenAI's API."""


Scored = Callable[[], list[Chunk]]
"""A prompt's tokens with their log-probabilities, which are there once the reply has begun."""


@dataclass(slots=True)
class TextChoice:
    """One completion, as it grows. `before`: text that is echoed before it, `scored` with its log-probabilities.
    `shown`: whether there is a reply, or the prompt alone."""

    index: int
    words: TokenTexts
    logprobs: bool
    trace: bool
    before: str = ""
    scored: Scored | None = None
    shown: bool = True
    text: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def opening(self) -> dict[str, Any] | None:
        """The first event of a stream, if there is something to echo by then."""
        return self._choice(self.before) if self.before and not self.scored else None

    def take(self, round_: ReplyRound) -> list[dict[str, Any]]:
        """Takes a round in. Returns its events; the one that says why the reply ended has nothing else to show."""
        ended = round_.chunks[-1].finish_reason
        events = self._echoed() + (self._shown(round_) if self.shown else [])
        if ended:
            self.finish = FINISH.get(ended, ended) if self.shown else "length"
            events.append({**self._choice(""), "finish_reason": self.finish})
        return events

    def _echoed(self) -> list[dict[str, Any]]:
        """The prompt, once."""
        if self.scored is None:
            return []
        self.chunks, self.scored = self.scored(), None
        return [{**self._choice(self.before), "logprobs": self.words.text_logprobs(self.chunks, 0)}]

    def _shown(self, round_: ReplyRound) -> list[dict[str, Any]]:
        event = self._choice("".join(chunk.text for chunk in round_.chunks))
        if self.logprobs:
            event["logprobs"] = self.words.text_logprobs(round_.chunks, len(self.before) + len(self.text))
            self.chunks += round_.chunks
        if self.trace:
            self.rounds.append(self.words.trace(round_))
            event |= self.rounds[-1]
        self.text += event["text"]
        return [event] if event["text"] or self.logprobs or self.trace else []

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The completion as a choice of a `text_completion`."""
        choice = {**self._choice(self.before + self.text), "finish_reason": self.finish}
        if self.logprobs:
            choice["logprobs"] = self.words.text_logprobs(self.chunks, 0)
        if self.trace:
            choice["trace"] = [token for made in self.rounds for token in made["trace"]]
        return choice


def plan(llm: LLM, settings: Settings, words: TokenTexts, trials: Trials, body: CompletionRequest) -> RequestPlan:
    """Tokens, sampling and drafting of every reply. Raises `PacelineError` and `ApiError`."""
    options.check_model(settings, body.model)
    given = _prompts(body)
    for at, prompt in enumerate(given):
        if isinstance(prompt, str):
            options.check_fits(llm, settings, prompt, f"prompt.{at}" if len(given) > 1 else "prompt")
    prompts = [_ids(llm, prompt, f"prompt.{at}" if len(given) > 1 else "prompt") for at, prompt in enumerate(given)]
    for tokens in prompts:
        options.check_length(llm, settings, tokens, "prompt")
    grammar = options.grammar(trials, body)
    length = options.length(llm, body, _LENGTH)
    # A round writes at least one token; where none is asked for, it is not shown.
    sampling = options.sampling(llm, body, max(1, length), body.logprobs, grammar)
    jobs = [replace(job, shown=length > 0) for job in options.jobs(llm, settings, body, prompts, sampling)]
    n = body.n or 1
    before = [_echo(llm, prompt) if body.echo else "" for prompt in given]
    scored: list[Scored | None] = [None] * len(prompts)
    if body.echo and body.logprobs is not None:
        for at, tokens in enumerate(prompts):
            scores = PromptLogprobs(body.logprobs)
            jobs[at * n] = replace(jobs[at * n], scores=scores)  # one of the replies to a prompt reads it for all
            pieces = _pieces(llm, given[at], tokens)
            before[at] = "".join(pieces)
            scored[at] = partial(_scored, tokens, pieces, scores)

    def choice(index: int) -> TextChoice:
        at = index // n
        return TextChoice(index, words, body.logprobs is not None, bool(body.trace), before[at], scored[at], length > 0)

    return RequestPlan(jobs, choice)


def _scored(tokens: Sequence[int], pieces: Sequence[str], scores: PromptLogprobs) -> list[Chunk]:
    return [
        Chunk(piece, token, "plain", None, said)
        for piece, token, said in zip(pieces, tokens, scores.tokens[: len(tokens)], strict=True)
    ]


def _pieces(llm: LLM, prompt: str | list[int], tokens: Sequence[int]) -> list[str]:
    """Return each token's share of the echoed text. Raises `Unfinished` when the client has left."""
    if isinstance(prompt, str):
        return [prompt[start:end] for start, end in pairwise([*llm.tokenizer.starts(prompt), len(prompt)])]
    text, abandoned = Detokenizer(llm.tokenizer.decode), ABANDONED.get()
    pieces = []
    for token in tokens:
        if abandoned and abandoned.is_set():
            raise Unfinished
        pieces.append(text.push(token))
    return [*pieces[:-1], pieces[-1] + text.flush()]


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _echo(llm: LLM, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)


def _ids(llm: LLM, prompt: str | list[int], param: str) -> list[int]:
    try:
        return llm.encode(prompt, raw=True)
    except PacelineError as error:
        raise bad_request(str(error), param) from error
