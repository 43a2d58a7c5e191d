"""/infill: the gap between two texts, in the shape of llama.cpp's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paceline.server import completions, options
from paceline.server.bodies import validated
from paceline.server.errors import ApiError, bad_request
from paceline.server.infill import infill_prompt, infill_tokens
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.schema_completions import CompletionRequest
from paceline.server.schema_tokens import InfillRequest
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest, Writer


def prepare(model: LoadedModel, settings: Settings, body: InfillRequest) -> PreparedRequest:
    """Prepare the reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    if body.n not in (None, 1):
        raise bad_request(f"n must be 1, got {body.n}", "n")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    texts = (body.input_prefix, body.prompt or "", body.input_suffix, *(part for file in files for part in file))
    options.check_length(model.llm, settings, "".join(texts), "input_prefix")
    prompt = infill_prompt(model.llm, body.input_prefix + (body.prompt or ""), body.input_suffix, files)
    request = body.completion(prompt)
    request["stop_token_ids"] = [*request.get("stop_token_ids", ()), *infill_tokens(model.llm).ends]
    jobs = completions.prepare(model, settings, validated(request, CompletionRequest)).jobs
    empty, indent, fields = bool(jobs[0].prompt_only), body.n_indent or 0, body.response_fields
    return PreparedRequest(jobs, lambda _: InfillWriter(model.name, empty, indent, fields))


class InfillWriter(Writer):
    """The text of the gap. `empty`: no token was requested, only that the prompt be read. `indent`: the text ends
    before a line that begins with fewer blanks. `fields`: what of the answer is sent, all of it if there are none."""

    def __init__(self, model: str, empty: bool, indent: int = 0, fields: Sequence[str] | None = None) -> None:
        self._model, self._empty, self._indent, self._fields = model, empty, indent, fields
        self._outdented = re.compile(rf"\n[ \t]{{0,{indent - 1}}}(?=[^ \t])") if indent else None
        self._text = ""
        self._finish, self._stop = "", ""

    def begin(self, usage: Usage) -> list[Event]:
        """Return nothing: the first event has text."""
        return []

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round."""
        last = round_.chunks[-1]
        self._finish, self._stop = last.finish_reason or "", last.stop or ""
        if self._empty or self.over or not round_.text:
            return []
        known = len(self._text)
        self._text += round_.text
        if self._outdented and (found := self._outdented.search(self._text, max(0, known - self._indent))):
            self._text, self.over = self._text[: found.end()], True
        return [{"content": self._text[known:], "stop": False}]

    def heartbeat(self) -> Event:
        """Return an event without text."""
        return {"content": "", "stop": False}

    def end(self, usage: Usage) -> list[Event]:
        """Return the event with the counts."""
        return [self._chosen({"content": "", **self._about(usage)})]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole text."""
        return self._chosen({"content": self._text, **self._about(usage)})

    def failed(self, error: ApiError) -> Event:
        """Return OpenAI's error."""
        return error.body

    def _about(self, usage: Usage) -> dict[str, Any]:
        kind = "word" if self._stop else {"length": "limit"}.get(self._finish, "eos")
        timings = {
            **_timings("prompt", usage.prompt, usage.first - usage.queued),
            **_timings("predicted", usage.written, usage.total - usage.first),
        }
        return {
            "stop": True,
            "stop_type": "limit" if self._empty or self.over else kind,
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


def _timings(name: str, count: int, seconds: float) -> dict[str, Any]:
    """Return llama.cpp's figures for `count` tokens."""
    ms = 1000 * max(0.0, seconds)
    figures = {"ms": ms, "per_token_ms": ms / max(1, count), "per_second": 1000 * count / ms if ms else 0.0}
    return {f"{name}_n": count, **{f"{name}_{key}": round(value, 3) for key, value in figures.items()}}
