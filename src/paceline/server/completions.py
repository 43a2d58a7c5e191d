"""/v1/completions: text as it is, without a chat template; one prompt or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.server import options
from paceline.server.chat import FINISH
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.running import Plan, Round
from paceline.server.schema import CompletionRequest
from paceline.server.trials import Trials
from paceline.server.words import Words
from paceline.stream import Chunk

_LENGTH = 16
"""Tokens of a completion that does not say how many, as in OpenAI's API."""


@dataclass(slots=True)
class TextChoice:
    """One completion, as it grows. `before`: text that is echoed before it."""

    index: int
    words: Words
    logprobs: bool
    trace: bool
    before: str = ""
    text: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def opening(self) -> dict[str, Any] | None:
        """The first event of a stream, if there is something to echo."""
        return self._choice(self.before) if self.before else None

    def take(self, round_: Round) -> dict[str, Any] | None:
        """Takes a round in. Returns its event, None where there is nothing to show."""
        ended = round_.chunks[-1].finish_reason
        text = "".join(chunk.text for chunk in round_.chunks)
        event = self._choice(text)
        if self.logprobs:
            event["logprobs"] = self.words.text_logprobs(round_.chunks, len(self.text))
            self.chunks += round_.chunks
        if self.trace:
            self.rounds.append(self.words.trace(round_))
            event |= self.rounds[-1]
        self.text += text
        if ended:
            event["finish_reason"] = self.finish = FINISH.get(ended, ended)
        return event if text or ended or self.logprobs or self.trace else None

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


def plan(llm: LLM, settings: Settings, words: Words, trials: Trials, body: CompletionRequest) -> Plan:
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
    sampling = options.sampling(llm, body, body.max_tokens or _LENGTH, body.logprobs, grammar)
    jobs = options.jobs(llm, settings, body, prompts, sampling)
    before = [_echo(llm, prompt) if body.echo else "" for prompt in given]

    def choice(index: int) -> TextChoice:
        return TextChoice(index, words, body.logprobs is not None, bool(body.trace), before[index // (body.n or 1)])

    return Plan(jobs, choice)


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
