"""/infill: the gap between two texts, in the shape of llama.cpp's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from paceline.server.api import Api, Encoder, Event
from paceline.server.compat import NO_REASONING, Strict, accepts, ignored_parameters
from paceline.server.errors import bad_request
from paceline.server.prepare import PreparedRequest
from paceline.server.replies import Usage
from paceline.server.request import GenerateRequest, TextPrompt
from paceline.server.schema import RequestBody, Text
from paceline.server.worker import ReplyRound


@accepts(NO_REASONING, ignored_parameters("time", "files stay in their order"))
class InfillFile(Strict):
    """Another file, which the model sees before the text."""

    filename: Annotated[str, Field(max_length=1000)] = ""
    text: Text


@accepts(ignored_parameters("samplers t_max_prompt_ms t_max_predict_ms", "editors send it with every request"))
class InfillRequest(RequestBody):
    """Body of /infill. `prompt`: the beginning of the current line, after `input_prefix`."""

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[InfillFile], Field(max_length=1000, fail_fast=True)] | None = None
    prompt: Text | None = None
    n_indent: (
        Annotated[int, Field(ge=0, le=1000, description="The text ends at a line that begins with fewer blanks.")]
        | None
    ) = None
    response_fields: (
        Annotated[
            list[Annotated[str, Field(max_length=100)]],
            Field(max_length=100, description="Parts of the answer to send, such as content or timings/prompt_n."),
        ]
        | None
    ) = None


class InfillEncoder(Encoder):
    """Encodes the text of a gap in the format of llama.cpp's server."""

    def __init__(self, model: str, empty: bool, indent: int = 0, fields: Sequence[str] | None = None) -> None:
        """Make an encoder.

        Args:
            model: The model's name.
            empty: True if no token was requested, and the prompt is only read.
            indent: The text ends before a line that begins with fewer blanks.
            fields: The parts of the answer to send. None for all.
        """
        self._model, self._empty, self._indent, self._fields = model, empty, indent, fields
        self._outdented = re.compile(rf"\n[ \t]{{0,{indent - 1}}}(?=[^ \t])") if indent else None
        self._text = ""
        self._finish, self._stop = "", ""

    def add(self, round_: ReplyRound) -> list[Event]:
        last = round_.chunks[-1]
        self._finish, self._stop = last.finish_reason or "", last.stop or ""
        if self._empty or self.is_complete or not round_.text:
            return []
        known = len(self._text)
        self._text += round_.text
        if self._outdented and (found := self._outdented.search(self._text, max(0, known - self._indent))):
            self._text, self.is_complete = self._text[: found.end()], True
        return [{"content": self._text[known:], "stop": False}]

    def heartbeat(self) -> Event:
        """Return an event without text."""
        return {"content": "", "stop": False}

    def end(self, usage: Usage) -> list[Event]:
        """Return the event with the counts."""
        return [self._chosen({"content": "", **self._about(usage)})]

    def document(self, usage: Usage) -> dict[str, Any]:
        return self._chosen({"content": self._text, **self._about(usage)})

    def _about(self, usage: Usage) -> dict[str, Any]:
        kind = "word" if self._stop else {"length": "limit"}.get(self._finish, "eos")
        timings = {
            **_timings("prompt", usage.prompt, usage.first - usage.queued),
            **_timings("predicted", usage.written, usage.total - usage.first),
        }
        return {
            "stop": True,
            "stop_type": "limit" if self._empty or self.is_complete else kind,
            "stopping_word": self._stop,
            "model": self._model,
            "tokens_predicted": usage.written,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "truncated": False,
            "timings": timings,
            "speculation": usage.speculation(),
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        if not self._fields:
            return answer
        flat = answer | {f"timings/{name}": value for name, value in answer["timings"].items()}
        return {name: flat[name] for name in self._fields if name in flat}


class Infill(Api[InfillRequest]):
    """Filling gaps, as in llama.cpp's server."""

    path = "/infill"
    body = InfillRequest
    about = "Fill the gap between two texts (llama.cpp's API)."

    def decode(self, body: InfillRequest) -> GenerateRequest:
        if body.n not in (None, 1):
            raise bad_request(f"n must be 1, got {body.n}", "n")
        return GenerateRequest(
            prompt=TextPrompt(
                texts=[body.input_prefix + (body.prompt or "")],
                after=body.input_suffix,
                files=[(file.filename, file.text) for file in body.input_extra or ()],
                param="input_prefix",
            ),
            sampling=body.sampling,
            constraints=body.constraints(),
            max_tokens=-1 if body.length is None else body.length,
            logprobs=0 if body.trace else None,
            speculation=body.speculation,
        )

    def encoder(self, body: InfillRequest, prepared: PreparedRequest) -> InfillEncoder:
        empty = prepared.jobs[0].prompt_only
        return InfillEncoder(prepared.model.name, empty, body.n_indent or 0, body.response_fields)


def _timings(name: str, count: int, seconds: float) -> dict[str, Any]:
    """Return llama.cpp's figures for `count` tokens."""
    ms = 1000 * max(0.0, seconds)
    figures = {"ms": ms, "per_token_ms": ms / max(1, count), "per_second": 1000 * count / ms if ms else 0.0}
    return {f"{name}_n": count, **{f"{name}_{key}": round(value, 3) for key, value in figures.items()}}
