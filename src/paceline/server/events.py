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
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream(StreamingResponse):
    """`close` is called once the stream is over, however it ends: read to its end, dropped by the client, or unread for
    `stall` seconds. What is unread by then fills the socket's buffer and no more."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], stall: float) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"},
        )
        self._events, self._close, self._stall = events, close, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patiently(message: Message) -> None:
            with anyio.fail_after(self._stall):
                await send(message)

        try:
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, patiently)
        finally:
            self._close()
