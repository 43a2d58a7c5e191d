"""Answers to requests for generated text: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from paceline.server.choices import PreparedRequest
from paceline.server.errors import api_error
from paceline.server.running import RunningRequest


class GeneratedAnswer:
    """The answer to one request for generated text."""

    def __init__(self, running: RunningRequest, prepared: PreparedRequest, model: str) -> None:
        # Not the request itself, which holds its body.
        self._running, self._model, self._document, self._event = running, model, prepared.document, prepared.event
        self._choices = [prepared.choice(index) for index in range(len(prepared.jobs))]
        self._created = int(time.time())
        self.close = running.close

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._running.id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    async def document(self) -> dict[str, Any]:
        """Return the finished answer. Raises the error that ended a reply early."""
        async for round_ in self._running.rounds():
            self._choices[round_.index].add_round(round_)
        choices = [choice.as_dict() for choice in self._choices]
        return self._object(self._document, choices, usage=self._running.usage())

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        """Yield the answer as it grows. An error is an event too, because the status has been sent by then."""
        more: dict[str, Any] = {"usage": None} if usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(self._object(self._event, [choice], **more))

        try:
            for choice in self._choices:
                if first := choice.first_event():
                    yield chunk(first)
            async for round_ in self._running.rounds():
                for content in self._choices[round_.index].add_round(round_):
                    yield chunk(content)
            if usage:
                yield event(self._object(self._event, [], usage=self._running.usage()))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            self._running.error = error
            yield event(api_error(error).body)
        finally:
            self.close()


def event(data: Mapping[str, Any]) -> bytes:
    """Return an event with this JSON."""
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream(StreamingResponse):
    """Response that streams events.

    `close` is called at the end in any case: the stream was read to its end, dropped by the client, or left unread for
    `stall` seconds. By then the unread part fills the socket's buffer and no more.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], stall: float) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"},
        )
        self._close, self._stall = close, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""

        async def send_within_limit(message: Message) -> None:
            with anyio.fail_after(self._stall):
                await send(message)

        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_within_limit)
        finally:
            self._close()
