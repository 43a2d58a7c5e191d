"""HTTP with limits: a slow, endless or hostile endpoint can neither hang the client nor fill its memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline.errors import InvalidOption, PacelineError, one_line

_PIECE = 1 << 16
_RETRY_AFTER = (0.2, 1.0)
"""Seconds before each retry of a request. Servers with a full queue reset connections."""
_JSON = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


class EndpointError(PacelineError):
    """An endpoint cannot be reached, or its answer is not valid.

    Attributes:
        status: HTTP status of the answer. 0 if there is none.
    """

    def __init__(self, cause: str, fix: str = "", status: int = 0) -> None:
        super().__init__(cause, fix)
        self.status = status


class _ConnectionReset(EndpointError):
    """The endpoint closed a connection without an answer."""


class Transport(Protocol):
    """Carries one request to an endpoint."""

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Return the status and the whole body of the answer. Raise `EndpointError` if there is none."""


@dataclass(frozen=True, slots=True)
class Http:
    """Requests over HTTP or HTTPS. Each has its own connection, and redirects are not followed.

    Attributes:
        base: Address of the API, such as http://127.0.0.1:8000/v1. A path that starts with // is relative to the host.
        key: API key. It is sent as a bearer token, and never shown.
        seconds: Time limit of a request, from the connection to the last byte.
        most: Largest answer, in bytes.
    """

    base: str
    key: str | None = field(default=None, repr=False)
    seconds: float = 300.0
    most: int = 8 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.base)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidOption(f"{_hidden(self.base)} is not an address", "Write http://HOST:PORT/v1")

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        for wait in _RETRY_AFTER:
            with contextlib.suppress(_ConnectionReset):
                return self._once(method, path, body)
            time.sleep(wait)
        return self._once(method, path, body)

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        parts = urlsplit(self.base)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self.seconds)
        headers = dict(_JSON) | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        full = path[1:] if path.startswith("//") else parts.path.rstrip("/") + path
        data = None if body is None else json.dumps(body).encode()
        late = threading.Event()
        watchdog: threading.Timer | None = None
        try:
            connection.connect()
            # A socket's timeout starts again with every byte, so it does not limit an answer that arrives slowly.
            watchdog = threading.Timer(self.seconds, _abort, (connection.sock, late))
            watchdog.daemon = True
            watchdog.start()
            connection.request(method, full, data, headers)
            response = connection.getresponse()
            data = self._read(response)
            if late.is_set():  # the watchdog closed the connection, which looks like the end of the answer
                raise TimeoutError
            # Some servers quote the key in their messages, and reports contain these messages.
            return response.status, data.replace(self.key.encode(), b"KEY") if self.key else data
        except (OSError, ValueError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise EndpointError(f"no complete answer within {self.seconds:.0f} s", "Use --timeout") from None
            kind_of_error = _ConnectionReset if isinstance(error, ConnectionResetError) else EndpointError
            raise kind_of_error(f"{parts.netloc}: {type(error).__name__}: {error}", "Is the server running?") from None
        finally:
            if watchdog:
                watchdog.cancel()
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size = [], 0
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > self.most:
                raise EndpointError(f"the answer has more than {self.most} bytes", "Lower --tokens")
        return b"".join(pieces)


def _hidden(address: str) -> str:
    """Return an address without user and password."""
    scheme, mark, rest = address.partition("://")
    return scheme + mark + rest.rpartition("@")[2]


def _abort(connected: socket.socket, late: threading.Event) -> None:
    """End a request that takes too long, whatever it is waiting for."""
    late.set()
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def parse_json(data: bytes) -> Any:
    """Parse untrusted JSON. Raise `EndpointError` if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        shown = one_line(data[:200].decode("utf-8", "replace"))
        raise EndpointError(f"the answer is not JSON ({type(error).__name__}): {shown}", "Check the address") from None


def parse_events(data: bytes) -> Iterator[Any]:
    """Parse server-sent events, up to [DONE]. Raise `EndpointError` for an event that is not JSON."""
    for line in data.split(b"\n"):
        if line.startswith(b"data:"):
            content = line[5:].strip()
            if content == b"[DONE]":
                return
            if content:
                yield parse_json(content)


def as_number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    with contextlib.suppress(OverflowError):
        return float(value) if is_number and math.isfinite(value) else None
    return None


def as_dict(value: Any) -> dict[str, Any]:
    """Return a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a JSON array, an empty one for anything else."""
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """Return a string, an empty one for anything else."""
    return value if isinstance(value, str) else ""
