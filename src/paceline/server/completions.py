"""/v1/completions: text as it is, without a chat template; one prompt or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.engine.detokenizer import Chunk, Detokenizer
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.errors import InvalidPrompt
from paceline.llm import LLM
from paceline.server import options
from paceline.server.choices import Choice, ChoicesWriter
from paceline.server.errors import bad_request
from paceline.server.infill import infill_prompt, infill_tokens
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.schema_completions import CompletionRequest
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest
from paceline.text.sandbox import ABANDONED, Unfinished

_DEFAULT_LENGTH = 16
"""Default maximum tokens, as in OpenAI's API."""

ScoredPrompt = Callable[[], list[Chunk]]
"""Returns a prompt's tokens with their log-probabilities, which are known once the reply has begun."""


@dataclass(slots=True, kw_only=True)
class TextChoice(Choice):
    """A choice of a text completion. `echo`: prompt shown before the reply, `scored` with its log-probabilities.

    `prompt_only`: the reply's tokens are not shown.
    """

    echo: str = ""
    scored: ScoredPrompt | None = None
    prompt_only: bool = False
    chunks: list[Chunk] = field(default_factory=list)

    def first_event(self) -> dict[str, Any] | None:
        """Return the event with the echo, unless that waits for its log-probabilities."""
        return self._event(self.echo) if self.echo and not self.scored else None

    def as_dict(self) -> dict[str, Any]:
        """Return a choice of a `text_completion`."""
        choice = {**self._event(self.echo + self.text), "finish_reason": self.finish_reason}
        if self.logprobs:
            choice["logprobs"] = self.token_texts.text_logprobs(self.chunks, 0)
        return choice | self._all_traced()

    def _event(self, text: str = "") -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}

    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        events = []
        if self.scored:
            self.chunks, self.scored = self.scored(), None
            events.append({**self._event(self.echo), "logprobs": self.token_texts.text_logprobs(self.chunks, 0)})
        if self.prompt_only:
            return events
        event = self._event(round_.text) | self._trace(round_)
        if self.logprobs:
            event["logprobs"] = self.token_texts.text_logprobs(round_.chunks, len(self.echo) + len(self.text))
            self.chunks += round_.chunks
        self.text += event["text"]
        return [*events, event] if event["text"] or self.logprobs or self.trace else events

    def _finish(self, reason: str) -> str:
        return "length" if self.prompt_only else Choice._finish(self, reason)


def prepare(model: LoadedModel, settings: Settings, body: CompletionRequest) -> PreparedRequest:
    """Prepare every reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    llm = model.llm
    prompt: Any = body.prompt
    given: list[str | list[int]] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    params = [f"prompt.{i}" if len(given) > 1 else "prompt" for i in range(len(given))]
    for prompt, param in zip(given, params, strict=True):
        if isinstance(prompt, str):
            options.check_length(llm, settings, prompt + (body.suffix or ""), param)
    prompts = [_tokens(llm, body, prompt, param) for prompt, param in zip(given, params, strict=True)]
    for tokens in prompts:
        options.check_length(llm, settings, tokens, "prompt")
    grammar = options.grammar(model.grammar_trials, body)
    length = options.length(llm, body, _DEFAULT_LENGTH)
    # A round generates at least one token; it is not shown if none was requested.
    logprobs = 0 if body.ranked and body.logprobs is None else body.logprobs
    sampling = options.sampling(llm, body, max(1, length), logprobs, grammar)
    if body.suffix and not body.ignore_eos:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill_tokens(llm).ends))
    jobs = [replace(job, prompt_only=length == 0) for job in options.jobs(llm, settings, body, prompts, sampling)]
    n = body.samples
    decode = llm.tokenizer.decode
    echoes = ["" if not body.echo else prompt if isinstance(prompt, str) else decode(prompt) for prompt in given]
    scored: list[ScoredPrompt | None] = [None] * len(prompts)
    if body.echo and body.logprobs is not None:
        for i, tokens in enumerate(prompts):
            scores = PromptLogprobs(body.logprobs)
            jobs[i * n] = replace(jobs[i * n], scores=scores)  # one reply's scores serve all samples of its prompt
            pieces = _pieces(llm, given[i], tokens)
            echoes[i] = "".join(pieces)
            scored[i] = partial(_scored_chunks, tokens, pieces, scores)

    def choice(index: int) -> TextChoice:
        return TextChoice(
            index=index,
            token_texts=model.token_texts,
            logprobs=body.logprobs is not None,
            trace=bool(body.trace),
            echo=echoes[index // n],
            scored=scored[index // n],
            prompt_only=length == 0,
        )

    def writer(answer_id: str) -> ChoicesWriter:
        head = {"id": answer_id, "model": model.name}
        usage = bool(body.stream_options and body.stream_options.include_usage)
        kinds, choices = ("text_completion", "text_completion"), [choice(i) for i in range(len(jobs))]
        if body.ranked:
            return BestOfWriter(head, kinds, choices, n, body.n or 1)
        return ChoicesWriter(head, kinds, choices, usage)

    return PreparedRequest(jobs, writer)


class BestOfWriter(ChoicesWriter):
    """Completions of which the likeliest are returned, those with the highest mean log-probability per token."""

    def __init__(
        self, head: Mapping[str, Any], kinds: tuple[str, str], choices: Sequence[TextChoice], samples: int, n: int
    ) -> None:
        """`samples`: replies to each prompt, of which `n` are returned."""
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


def _tokens(llm: LLM, body: CompletionRequest, prompt: Any, param: str) -> list[int]:
    """Return a prompt's token ids. Raises `ApiError` 400."""
    if not body.suffix:
        return options.token_ids(llm, prompt, param)
    if not isinstance(prompt, str):
        raise bad_request(f"{param} must be text, not token ids, beside suffix", param)
    try:
        return infill_prompt(llm, prompt, body.suffix)
    except InvalidPrompt as error:
        raise bad_request(str(error), "suffix") from error


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
