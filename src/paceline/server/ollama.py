"""/api/chat and /api/generate: chats and prompts in the shape of Ollama's API."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, TypeVar

from paceline.server import chat, completions
from paceline.server.bodies import validated
from paceline.server.choices import TokenTexts
from paceline.server.errors import ApiError, bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import ChatReply, Reasoning, ReplyText
from paceline.server.schema import ChatRequest
from paceline.server.schema_completions import CompletionRequest
from paceline.server.schema_ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest, Writer, dumps

B = TypeVar("B", ChatRequest, CompletionRequest)


def prepare_chat(model: LoadedModel, settings: Settings, body: OllamaChatRequest) -> PreparedRequest:
    """Prepare the reply to a chat; without messages there is none, and the model is loaded.

    Raises `PacelineError` and `ApiError`.
    """
    if body.empty:
        return PreparedRequest([], lambda _: OllamaWriter(body.model, ChatReply(), None, "message"))
    if (last := body.messages[-1]).role == "user" and last.images:
        param = f"messages.{len(body.messages) - 1}.images"
        raise bad_request(f"{param}: not supported by this server. Leave it out, or send []", param)
    request = _within(body, body.as_chat(), ChatRequest)
    prepared = chat.prepare(model, settings, request, truncate=body.truncate is not False)
    texts = model.token_texts if body.logprobs else None
    return PreparedRequest(prepared.jobs, lambda _: OllamaWriter(body.model, prepared.reply(), texts, "message"))


def prepare_text(model: LoadedModel, settings: Settings, body: OllamaGenerateRequest) -> PreparedRequest:
    """Prepare the reply to one prompt; without a prompt there is none, and the model is loaded.

    Raises `PacelineError` and `ApiError`.
    """
    if body.empty:
        return PreparedRequest([], lambda _: OllamaWriter(body.model, ChatReply(), None, "response"))
    texts = model.token_texts if body.logprobs else None
    if body.is_text:
        jobs = completions.prepare(model, settings, _within(body, body.as_text(), CompletionRequest)).jobs
        return PreparedRequest(jobs, lambda _: OllamaWriter(body.model, ChatReply(), texts, "response"))
    prepared = chat.prepare(model, settings, _within(body, body.as_chat(), ChatRequest))
    return PreparedRequest(prepared.jobs, lambda _: OllamaWriter(body.model, prepared.reply(), texts, "response"))


def _within(body: OllamaRequest, other: dict[str, Any], kind: type[B]) -> B:
    """Return a request in OpenAI's shape, with the parameters that its ranges do not allow. Raises `ApiError` 400."""
    return validated(other, kind).model_copy(update=body.beyond)


def unloaded(body: OllamaRequest) -> dict[str, Any]:
    """Return the answer to a request that only unloads the model."""
    nothing = {"response": ""} if isinstance(body, OllamaGenerateRequest) else {"message": _message("")}
    return {**_head(body.model), **nothing, "done": True, "done_reason": "unload"}


class OllamaWriter(Writer):
    """A reply as lines of JSON. `token_texts`: None without log-probabilities. `kind`: "message", or "response" for the
    reply to one prompt."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, reply: ChatReply, token_texts: TokenTexts | None, kind: str) -> None:
        self._model, self._reply, self._token_texts, self._kind = model, reply, token_texts, kind
        self._logprobs: list[dict[str, Any]] = []

    def begin(self, usage: Usage) -> list[Event]:
        """Return nothing: the first line has text."""
        return []

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round. Calls are complete, and follow at the end."""
        parts = self._reply.add(round_)
        new = [self._token_texts.chat_logprobs(chunk) for chunk in round_.chunks] if self._token_texts else []
        self._logprobs += new
        events = []
        for part in parts:
            if isinstance(part, Reasoning):
                events.append(self._line("", part.text))
            elif isinstance(part, ReplyText):
                events.append(self._line(part.text))
        if self._reply.finish_reason and self._reply.calls:
            events.append(self._line("", calls=self._calls()))
        if new:
            events = events or [self._line("")]
            events[0]["logprobs"] = new
        return events

    def heartbeat(self) -> Event:
        """Return a line without text."""
        return self._line("")

    def end(self, usage: Usage) -> list[Event]:
        """Return the last line, with the counts."""
        return [{**self._line(""), **self._counts(usage)}]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole reply."""
        whole = self._line(self._reply.text, self._reply.reasoning, self._calls())
        return {**whole, **self._counts(usage), **({"logprobs": self._logprobs} if self._token_texts else {})}

    def failed(self, error: ApiError) -> Event:
        """Return Ollama's error."""
        return {"error": error.ollama}

    def encode(self, event: Event) -> bytes:
        """Return a line."""
        return dumps(event) + b"\n"

    def _line(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> Event:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return {
            **_head(self._model),
            **({"message": {**_message(text), **more}} if self._kind == "message" else {"response": text, **more}),
            "done": False,
        }

    def _calls(self) -> list[dict[str, Any]]:
        """Return the calls whose arguments are complete."""
        found = []
        for index, call in enumerate(self._reply.calls):
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                continue
            found.append({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
        return found

    def _counts(self, usage: Usage) -> dict[str, Any]:
        reason = {None: "load", "length": "length"}.get(self._reply.finish_reason, "stop")
        seconds = {
            "total_duration": usage.total,
            "load_duration": usage.queued,
            "prompt_eval_duration": max(0.0, usage.first - usage.queued),
            "eval_duration": max(0.0, usage.total - usage.first),
        }
        counts = {"prompt_eval_count": usage.prompt, "eval_count": usage.written}
        durations = {name: int(1e9 * value) for name, value in seconds.items()}
        return {"done": True, "done_reason": reason, **durations, **counts, "speculation": usage.speculation()}


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(timezone.utc).isoformat()}
