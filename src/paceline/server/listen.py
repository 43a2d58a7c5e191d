"""The listening process: start, signals, graceful shutdown."""

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

from paceline.errors import InvalidOption
from paceline.server.connections import Connection, max_connections
from paceline.server.worker import Worker

_SWITCH_INTERVAL = 0.001
"""Seconds after which the event loop's thread releases the interpreter to the engine's thread."""
_MARGIN = 1.0
"""Seconds after the grace period for telling clients why their streams ended."""
_KILL = 5.0
"""Seconds after that at which the process is ended, whatever it is doing."""


def check_address(host: str, port: int) -> None:
    """Raise `InvalidOption` if the address cannot be bound, before a model is loaded and not after."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise InvalidOption(
            f"cannot listen on {host}, port {port}: {error.strerror}",
            "Give another --port, or a --host of this machine",
        ) from error


def run(app: FastAPI, worker: Worker, host: str, port: int, grace: float, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; then replies have `grace` seconds to end, after which they are cancelled.

    `ready` is called with the URL as soon as the server listens, with the actual port in place of 0.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    asyncio.run(_serve(app, worker, host, port, grace, ready))


async def _serve(
    app: FastAPI, worker: Worker, host: str, port: int, grace: float, ready: Callable[[str], None]
) -> None:
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
        timeout_graceful_shutdown=max(1, round(grace + _MARGIN)),
    )
    server = _Server(config, worker, grace, ready)
    # uvicorn raises the signal that stopped it again at the end, which by default would kill the process.
    signal.signal(signal.SIGTERM, lambda *_: None)
    worker.start()
    try:
        await server.serve()
    finally:
        await worker.stop(0.0)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._worker, self._grace, self._ready = worker, grace, ready
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(None)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            return

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. The worker is told on the event loop, since the handler may have interrupted anything."""
        super().handle_exit(sig, frame)
        # If anything hangs, even in native code: write its traceback to the log and exit.
        faulthandler.dump_traceback_later(self._grace + _MARGIN + _KILL, exit=True)
        self._loop.call_soon_threadsafe(self._worker.drain, self._grace)
