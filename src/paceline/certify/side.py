"""One side of a comparison: an endpoint with or without speculation, and its replies as values."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.certify.transport import (
    EndpointError,
    Transport,
    as_dict,
    as_list,
    as_number,
    as_text,
    parse_events,
    parse_json,
)
from paceline.errors import PacelineError

Body = Mapping[str, Any]
"""Fields of a request to /v1/chat/completions, or of /v1/completions if it has a prompt."""
_REFUSED = (400, 404, 405, 415, 422, 501)
_BUSY = (429, 502, 503, 504)
_TRIES = 4
_REMEMBERED = 200


class NotOffered(PacelineError):
    """The endpoint refuses a request, or ignores a field, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a reply, with its log-probability and the most likely alternatives (text -> log-probability)."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to one request.

    Attributes:
        text: The reply, after the reasoning if there is any.
        finish: The finish reason, such as "stop" or "length".
        tokens: Number of tokens, None if the endpoint does not count them.
        prompt_tokens: Number of tokens of the prompt, or None.
        scores: Tokens with log-probabilities. Empty unless requested.
        calls: Tool calls as (name, arguments).
        others: Texts of the other choices if n > 1.
        drafted: Number of drafted tokens, None if the endpoint does not report it.
        seconds: Time of the request.
    """

    text: str
    finish: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    scores: tuple[ScoredToken, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()
    drafted: int | None = None
    seconds: float = field(default=0.0, compare=False)


@dataclass
class Side:
    """An endpoint with the fields that switch its speculation on or off.

    Attributes:
        name: "speculative" or "plain", for reports.
        transport: Carries the requests.
        model: Name of the model, None for the server's first one.
        extra: Fields that are added to every request.
        raw: True to send prompts as plain text (/completions) instead of chats.
        requests: Number of requests so far.
        tokens: Number of tokens received so far.
        drafted: Number of tokens drafted so far, None if the endpoint does not report it.
        history: The latest requests: (prompt, fields as JSON) -> text.
    """

    name: str
    transport: Transport
    model: str | None = None
    extra: Body = field(default_factory=dict)
    raw: bool = False
    requests: int = 0
    tokens: int = 0
    drafted: int | None = None
    history: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def ask(self, prompt: str, **fields: Any) -> Reply:
        """Send a prompt, greedily unless `fields` say otherwise.

        Raises:
            NotOffered: If the endpoint refuses the request.
            EndpointError: If there is no valid answer.
        """
        content = {"prompt": prompt} if self.raw else {"messages": [{"role": "user", "content": prompt}]}
        body: dict[str, Any] = {"temperature": 0, **content, **fields, **self.extra}
        if self.raw and (top := body.pop("top_logprobs", None)) is not None:
            body["logprobs"] = top
        if self.model is not None:
            body["model"] = self.model
        started = time.perf_counter()
        data = self._send("/completions" if self.raw else "/chat/completions", body)
        try:
            reply = _streamed(data) if body.get("stream") else _whole(parse_json(data))
        except RecursionError:
            raise EndpointError("the answer is nested too deeply", "Check the address") from None
        with self._lock:
            self.tokens += reply.tokens or 0
            if reply.drafted is not None:
                self.drafted = (self.drafted or 0) + reply.drafted
            self.history[prompt, json.dumps(fields, sort_keys=True)] = reply.text
            if len(self.history) > _REMEMBERED:
                del self.history[next(iter(self.history))]
        return replace(reply, seconds=time.perf_counter() - started)

    def _send(self, path: str, body: Body) -> bytes:
        for attempt in range(_TRIES):
            with self._lock:
                self.requests += 1
            status, data = self.transport("POST", path, body)
            if status == 200:
                return data
            if status in _REFUSED:
                raise NotOffered(_message(data))
            if status not in _BUSY or attempt == _TRIES - 1:
                break
            time.sleep(0.5 * 2**attempt)
        fix = "Set PACELINE_CERTIFY_KEY" if status in (401, 403) else "Read the server's log"
        raise EndpointError(f"the {self.name} side answered {status}: {_message(data)}", fix, status)


def _message(data: bytes) -> str:
    """Return the message of an error, at most 200 characters of it."""
    try:
        answer = as_dict(parse_json(data[:10_000]))
    except EndpointError:
        return data[:200].decode("utf-8", "replace")
    error = answer.get("error", answer)
    return (as_text(as_dict(error).get("message")) or as_text(error) or str(answer))[:200]


def _whole(answer: Any) -> Reply:
    choices = [as_dict(choice) for choice in as_list(as_dict(answer).get("choices"))]
    if not choices:
        raise EndpointError(f"the answer has no choices: {str(answer)[:200]}", "Is this an OpenAI-compatible API?")
    choices.sort(key=lambda choice: as_number(choice.get("index")) or 0)
    texts = [_content(choice, as_dict(choice.get("message"))) for choice in choices]
    first, message = choices[0], as_dict(choices[0].get("message"))
    functions = [as_dict(as_dict(call).get("function")) for call in as_list(message.get("tool_calls"))]
    calls = tuple((as_text(call.get("name")), as_text(call.get("arguments"))) for call in functions)
    usage = as_dict(as_dict(answer).get("usage"))
    return Reply(
        texts[0],
        as_text(first.get("finish_reason")),
        _count(usage, "completion_tokens"),
        _count(usage, "prompt_tokens"),
        _scores(as_dict(first.get("logprobs"))),
        calls,
        tuple(texts[1:]),
        _drafted(answer),
    )


def _drafted(answer: Body) -> int | None:
    """Return the number of drafted tokens, as llama.cpp ("timings"), vLLM and Paceline ("metrics") report it."""
    if timings := as_dict(answer.get("timings")):
        return _count(timings, "draft_n") or 0  # llama.cpp omits zero
    return _count(as_dict(as_dict(answer.get("metrics")).get("speculative_decoding")), "num_draft_tokens")


def _content(choice: Body, message: Body) -> str:
    reasoning = as_text(message.get("reasoning_content")) or as_text(message.get("reasoning"))
    return reasoning + (as_text(message.get("content")) or as_text(choice.get("text")))


def _count(usage: Body, name: str) -> int | None:
    number = as_number(usage.get(name))
    return None if number is None else int(number)


def _streamed(data: bytes) -> Reply:
    pieces: list[str] = []
    finish = ""
    usage: Body = {}
    for event in parse_events(data):
        usage = as_dict(as_dict(event).get("usage")) or usage
        for choice in map(as_dict, as_list(as_dict(event).get("choices"))[:1]):
            pieces.append(_content(choice, as_dict(choice.get("delta"))))
            finish = as_text(choice.get("finish_reason")) or finish
    return Reply("".join(pieces), finish, _count(usage, "completion_tokens"), _count(usage, "prompt_tokens"))


def _scores(logprobs: Body) -> tuple[ScoredToken, ...]:
    """Read log-probabilities in the format of chats ("content") or of text completions ("tokens")."""
    rows = [as_dict(row) for row in as_list(logprobs.get("content"))]
    if not rows:
        lists = (as_list(logprobs.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs"))
        rows = [{"token": a, "logprob": b, "top_logprobs": c} for a, b, c in zip(*lists, strict=False)]
    found = []
    for row in rows:
        top = row.get("top_logprobs")
        pairs = top.items() if isinstance(top, dict) else [(x.get("token"), x.get("logprob")) for x in _objects(top)]
        numbers = {as_text(token): number for token, value in pairs if (number := as_number(value)) is not None}
        found.append(ScoredToken(as_text(row.get("token")), as_number(row.get("logprob")) or 0.0, numbers))
    return tuple(found)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [as_dict(one) for one in as_list(value)]
