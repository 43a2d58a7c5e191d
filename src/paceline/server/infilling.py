"""/infill: the gap between two texts, in the shape of llama.cpp's API."""

from __future__ import annotations

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
    return PreparedRequest(jobs, lambda _: InfillWriter(model.name, bool(jobs[0].prompt_only)))


class InfillWriter(Writer):
    """The text of the gap. `empty`: no token was requested, only that the prompt be read."""

    def __init__(self, model: str, empty: bool) -> None:
        self._model, self._empty = model, empty
        self._text, self._tokens = "", 0
        self._finish, self._stop = "", ""

    def begin(self, usage: Usage) -> list[Event]:
        """Return nothing: the first event has text."""
        return []

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round."""
        last = round_.chunks[-1]
        self._finish, self._stop = last.finish_reason or "", last.stop or ""
        if self._empty or not round_.text:
            return []
        self._text += round_.text
        return [{"content": round_.text, "stop": False}]

    def heartbeat(self) -> Event:
        """Return an event without text."""
        return {"content": "", "stop": False}

    def end(self, usage: Usage) -> list[Event]:
        """Return the event with the counts."""
        return [{"content": "", **self._about(usage)}]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole text."""
        return {"content": self._text, **self._about(usage)}

    def failed(self, error: ApiError) -> Event:
        """Return OpenAI's error."""
        return error.body

    def _about(self, usage: Usage) -> dict[str, Any]:
        kind = "word" if self._stop else {"length": "limit"}.get(self._finish, "eos")
        seconds = {"prompt_ms": usage.first - usage.queued, "predicted_ms": usage.total - usage.first}
        timings = {name: round(1000 * max(0.0, value), 3) for name, value in seconds.items()}
        return {
            "stop": True,
            "stop_type": "limit" if self._empty else kind,
            "stopping_word": self._stop,
            "model": self._model,
            "tokens_predicted": usage.written,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "timings": {"prompt_n": usage.prompt, "predicted_n": usage.written, **timings},
            "speculation": usage.speculation(),
        }
