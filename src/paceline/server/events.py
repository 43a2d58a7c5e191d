"""Server-sent events: a stream that ends when its client leaves, or leaves it unread."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


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
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, send_within_limit)
        finally:
            self._close()
