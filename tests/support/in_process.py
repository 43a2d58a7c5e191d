"""An ASGI application in the event loop of a separate thread, and an HTTP transport that calls it without a socket."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import uvicorn
from fastapi import FastAPI

from paceline.server.listen import Connection

HOST = "127.0.0.1"
_GRACE = 2
"""Seconds for requests to end when the application stops."""
_log = logging.getLogger(__name__)


class AppThread:
    """Runs an application from construction to `close`."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self._requests: set[asyncio.Task[None]] = set()
        self._server: uvicorn.Server | None = None
        self._serving: Future[None] | None = None
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server under test", daemon=True)
        self._thread.start()
        self._ready.wait(60)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            self.loop.close()

    async def _serve(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            self._ready.set()
            await self._stop.wait()
            if self._server and self._serving:
                self._server.should_exit = True
                await asyncio.wrap_future(self._serving)
            if self._requests:
                _, late = await asyncio.wait(self._requests, timeout=_GRACE)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)

    def start(self, exchange: Exchange, scope: dict[str, Any]) -> None:
        """Answer a request."""
        self.loop.call_soon_threadsafe(self._start, exchange, scope)

    def _start(self, exchange: Exchange, scope: dict[str, Any]) -> None:
        task = self.loop.create_task(exchange.run(self.app, scope))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def listen(self, connections: int | None = None) -> int:
        """Also listen on a free port, and return it. `connections` is the maximum number of connections plus 1."""
        config = uvicorn.Config(
            self.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=connections,
            timeout_graceful_shutdown=_GRACE,
        )
        listener = socket.create_server((HOST, 0))
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16
        )  # makes the server notice quickly that a client does not read
        port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([listener]), self.loop)
        while not self._server.started and not self._serving.done():
            time.sleep(0.005)
        return port

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended with an error
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error


class AppTransport(httpx.BaseTransport):
    """Delivers a response message by message, while the application still writes it.

    Closing a response early means that the client disconnects: the application receives `http.disconnect`, and later
    messages are dropped, as with uvicorn.
    """

    def __init__(self, thread: AppThread) -> None:
        self._thread = thread

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        timeout = request.extensions.get("timeout", {}).get("read")
        exchange = Exchange(self._thread.loop, list(request.stream), timeout)
        self._thread.start(exchange, _scope(request))
        start = exchange.next()
        if start is None:
            raise httpx.RemoteProtocolError("the application ended without a response", request=request)
        return httpx.Response(start["status"], headers=start.get("headers", ()), stream=exchange, request=request)


class Exchange(httpx.SyncByteStream):
    """One request, and the body of its response."""

    def __init__(self, loop: asyncio.AbstractEventLoop, body: list[bytes], timeout: float | None) -> None:
        """Create an exchange that waits at most `timeout` seconds for each message."""
        self._loop, self._body, self._timeout = loop, body, timeout
        self._sent: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._over = asyncio.Event()

    async def run(self, app: FastAPI, scope: dict[str, Any]) -> None:
        """Call the application, in its event loop."""
        parts = [{"type": "http.request", "body": part, "more_body": True} for part in self._body]
        received = iter([*parts, {"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            if part := next(received, None):
                return part
            await self._over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if not self._over.is_set():
                self._sent.put(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    self._over.set()

        try:
            await app(scope, receive, send)
        except Exception:
            _log.exception("Exception in ASGI application")
        finally:
            self._sent.put(None)

    def next(self) -> dict[str, Any] | None:
        """Return the application's next message, or None after the last message."""
        try:
            return self._sent.get(timeout=self._timeout)
        except queue.Empty:
            raise httpx.ReadTimeout(f"no message from the application within {self._timeout} s") from None

    def __iter__(self) -> Iterator[bytes]:
        while message := self.next():
            yield message.get("body", b"")
            if not message.get("more_body"):
                return
        raise httpx.RemoteProtocolError("the application ended in the middle of its response")

    def close(self) -> None:
        with suppress(RuntimeError):  # the application has ended
            self._loop.call_soon_threadsafe(self._over.set)


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": (HOST, 50_000),
        "server": (HOST, 80),
        "state": {},
    }
