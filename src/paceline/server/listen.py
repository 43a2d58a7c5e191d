"""The listening process: start, limits on connections, signals, graceful shutdown."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import InvalidOption
from paceline.server.limits import STALL_SECONDS
from paceline.server.models import Models

_SWITCH_INTERVAL = 0.001
"""Seconds after which a thread must release the GIL (`sys.setswitchinterval`), so that the event loop does not delay
the engine's thread."""
_GOODBYE_SECONDS = 1.0
"""Seconds after the grace period for telling clients why their streams ended."""
_KILL_SECONDS = 5.0
"""Seconds after `_GOODBYE_SECONDS` until the process is killed."""
_MAX_CONNECTIONS, _MAX_OPEN_FILES = 1024, 4096
"""Maximum connections, and the limit of open files that they need."""
_HEADER_SECONDS = 10.0
"""Seconds within which the head of a request must arrive."""
_STALL_SECONDS, _MIN_RATE = STALL_SECONDS, 100_000
"""Seconds within which a client must read all data sent to it, or at least `_MIN_RATE` bytes per second."""


def check_address(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`. Raises `InvalidOption` if one cannot be bound, before a model is loaded."""
    found = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                found.append(str(address[0]))
    except OSError as error:
        raise InvalidOption(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            "Give another --port, or a --host of this machine",
        ) from error
    return found


def run(app: FastAPI, models: Models, host: str, port: int, grace: float, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Then cancel the replies that have not ended within `grace` seconds.

    `ready` is called with the URL as soon as the server listens, with the actual port in place of 0.
    """
    limit = max_connections()
    config = uvicorn.Config(
        app,
        host,
        port,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        limit_concurrency=limit,
        backlog=limit // 8,  # all of these may be accepted before the first is counted
        timeout_graceful_shutdown=max(1, round(grace + _GOODBYE_SECONDS)),
    )

    async def serve() -> None:
        server = _ListeningServer(config, models, grace, ready)
        # After its shutdown, uvicorn raises the signal again. By default, this would kill the process.
        signal.signal(signal.SIGTERM, lambda *_: None)
        await server.serve()

    sys.setswitchinterval(_SWITCH_INTERVAL)
    asyncio.run(serve())


class _ListeningServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, models: Models, grace: float, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._models, self._grace, self._ready = models, grace, ready
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(None)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            return

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. The workers are stopped on the event loop, because the signal may have interrupted any
        code."""
        super().handle_exit(sig, frame)
        # If anything hangs, even in native code, write the traceback to the log and exit.
        faulthandler.dump_traceback_later(self._grace + _GOODBYE_SECONDS + _KILL_SECONDS, exit=True)
        self._loop.call_soon_threadsafe(self._models.drain, self._grace)


def max_connections() -> int:
    """Raise the soft limit of open files if necessary, and return the maximum number of connections.

    Half of the files are left for everything else, including connections that are accepted but not counted yet.
    """
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, soft // 2)


class Connection(H11Protocol):
    """uvicorn's connection. It is closed if the head of a request takes too long, or if the client does not read.

    Once there are `limit_concurrency` connections, a new one replaces the connection that has been waiting longest for
    its request. If none is waiting, uvicorn answers the new one with 503.
    """

    _unread: asyncio.TimerHandle | None = None
    """Timer that runs while the client has unread bytes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timeout = self.loop.call_later(_HEADER_SECONDS, self._close_idle)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        self._timeout.cancel()
        self._timeout = self.loop.call_later(_HEADER_SECONDS, self._close_idle)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeout.cancel()
        self._watch_reader(False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._watch_reader(self.transport.is_closing())  # a closing connection waits until the rest is read
        super().resume_writing()

    def _watch_reader(self, watch: bool = True) -> None:
        if self._unread:
            self._unread.cancel()
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(_STALL_SECONDS, self._abort_unless_read, size) if watch and size else None

    def _abort_unless_read(self, size: int) -> None:
        """Abort the connection if too few of its `size` unread bytes have been read. Otherwise wait for the rest."""
        if size - self.transport.get_write_buffer_size() < _STALL_SECONDS * _MIN_RATE:
            self.transport.abort()
        else:
            self._watch_reader()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_idle(self) -> None:
        """Close the connection if no request is in progress. Bytes of an unfinished head do not postpone this."""
        if self._idle:
            self.transport.close()
            self._watch_reader()

    def _make_room(self) -> None:
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        waiting = [other for other in others if other._idle or other.cycle.more_body]
        if waiting:
            oldest = min(waiting, key=lambda other: other._timeout.when())
            self.connections.discard(oldest)
            oldest.transport.abort()
