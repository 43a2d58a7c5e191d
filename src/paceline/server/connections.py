"""Bounds on connections: how many there are, and how long one may stay open without a request."""

from __future__ import annotations

import asyncio
import sys

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST, _FILES = 1024, 4096
"""Connections at most, and the files that the process asks the system for."""
_HEAD = 10.0
"""Seconds within which the head of a request must arrive."""


def most_connections() -> int:
    """Raise the soft limit of open files as far as it helps, and return how many connections there may be.

    Half of the files are left to all else, connections that have been accepted and not been counted yet included.
    """
    if sys.platform == "win32":
        return _MOST
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)


class Connection(H11Protocol):
    """uvicorn's connection, closed when a request's head takes too long.

    Where there are as many connections as `limit_concurrency` allows, a new one takes the place of the one that has
    been waiting for its request for longest. Where all have theirs, uvicorn answers the new one with 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._closing = self.loop.call_later(_HEAD, self._close_idle)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        self._closing.cancel()
        self._closing = self.loop.call_later(_HEAD, self._close_idle)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_idle(self) -> None:
        """However many bytes of a head have come: their arrival does not put it off."""
        if self._idle:
            self.transport.close()

    def _make_room(self) -> None:
        others = (one for one in self.connections if isinstance(one, Connection) and one is not self)
        waiting = [one for one in others if one._idle or one.cycle.more_body]
        if waiting:
            oldest = min(waiting, key=lambda one: one._closing.when())
            self.connections.discard(oldest)
            oldest.transport.abort()
