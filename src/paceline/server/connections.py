"""Limits on connections: their number, and how long one may stay open without a request."""

from __future__ import annotations

import asyncio
import sys

from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_CONNECTIONS, _FILES = 1024, 4096
"""Maximum connections, and the limit of open files that they need."""
_HEADER_TIMEOUT = 10.0
"""Seconds within which the head of a request must arrive."""


def max_connections() -> int:
    """Raise the soft limit of open files as far as it helps, and return the maximum number of connections.

    Half of the files are left for everything else, including connections that are accepted but not counted yet.
    """
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, soft // 2)


class Connection(H11Protocol):
    """uvicorn's connection, closed if the head of a request takes too long.

    At `limit_concurrency` connections a new one replaces the one that has been waiting longest for its request. If none
    is waiting, uvicorn answers the new one with 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timeout = self.loop.call_later(_HEADER_TIMEOUT, self._close_idle)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        self._timeout.cancel()
        self._timeout = self.loop.call_later(_HEADER_TIMEOUT, self._close_idle)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeout.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_idle(self) -> None:
        """Close the connection without a request. Bytes of an unfinished head do not postpone this."""
        if self._idle:
            self.transport.close()

    def _make_room(self) -> None:
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        waiting = [other for other in others if other._idle or other.cycle.more_body]
        if waiting:
            oldest = min(waiting, key=lambda other: other._timeout.when())
            self.connections.discard(oldest)
            oldest.transport.abort()
