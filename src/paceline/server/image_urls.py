"""Fetching images from hosts that --allow-image-urls names.

A URL lets a client make this server send a request. Therefore, only the named hosts are contacted, even after
a redirect. A host in a private network must be named literally: a pattern does not allow it. The address is
looked up once, so that it cannot change between the check and the connection.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import string
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from paceline.errors import InvalidPrompt

TOTAL_SECONDS = 10.0
"""Seconds for all images of a request, including redirects."""
_MAX_REDIRECTS = 3
_CHUNK_BYTES = 1 << 16
_WILDCARDS = frozenset("*?[")
"""Characters of patterns. An entry with one of them never counts as a literal name, even if a host is called "*"."""


def fetch(url: str, hosts: Sequence[str], limit: int, seconds: float = TOTAL_SECONDS) -> bytes:
    """Return the bytes at a URL.

    Args:
        url: An http or https URL.
        hosts: Patterns of the hosts that may be contacted.
        limit: Maximum number of bytes.
        seconds: Remaining time.

    Raises:
        InvalidPrompt: If the host is not allowed, does not answer in time, or sends no image of at most `limit` bytes.
    """
    if not hosts:
        raise InvalidPrompt(
            "this server fetches no images from URLs", "Send a data URL, or start the server with --allow-image-urls"
        )
    deadline, base = time.monotonic() + seconds, ""
    for _ in range(_MAX_REDIRECTS + 1):
        try:
            base = urljoin(base, url)
            parts = urlsplit(base)
        except ValueError as error:
            raise _malformed() from error
        connection = _connection(parts, hosts, deadline)
        try:
            status, location, data = _request(connection, parts, limit, deadline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                raise _too_slow() from error
            raise InvalidPrompt(f"the image could not be fetched ({error})", "Send its data instead") from error
        finally:
            connection.close()
        if status == 200:
            return data
        if status not in (301, 302, 303, 307, 308) or not location:
            raise InvalidPrompt(f"the host of the image answered with status {status}", "Send its data instead")
        url = location
    raise InvalidPrompt(f"the image's URL redirects more than {_MAX_REDIRECTS} times", "Send its data instead")


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that has been checked."""

    def __init__(self, host: str, port: int, address: str, encrypted: bool, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._address, self._encrypted = address, encrypted

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._encrypted:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _connection(url: SplitResult, hosts: Sequence[str], deadline: float) -> _PinnedConnection:
    """Return a connection, not opened yet, to the host of a URL."""
    try:
        host, port = (url.hostname or "").rstrip("."), url.port
    except ValueError:
        host, port = "", None
    if url.scheme not in ("http", "https") or not host:
        raise _malformed()
    if url.username or not any(fnmatchcase(host, pattern.lower()) for pattern in hosts):
        raise InvalidPrompt(f"images from the host {host!r:.100} are not allowed", "Send the image's data instead")
    encrypted = url.scheme == "https"
    port = port or (443 if encrypted else 80)
    literal = [pattern.lower() for pattern in hosts if not _WILDCARDS.intersection(pattern)]
    address = _address(host, port, private=host in literal)
    return _PinnedConnection(host, port, address, encrypted, _seconds_left(deadline))


def _address(host: str, port: int, private: bool) -> str:
    """Return an address of a host. `private`: the address may be in a private network."""
    try:
        found = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, ValueError) as error:  # ValueError: characters that no host name contains
        raise InvalidPrompt(f"the host {host!r:.100} was not found", "Check the image's URL") from error
    public = [one for one in found if private or _is_public(str(one).partition("%")[0])]
    if not public:
        raise InvalidPrompt(
            f"the host {host!r:.100} has only addresses in private networks",
            "Name the host itself, without *, in --allow-image-urls",
        )
    return str(public[0])


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_site_local:
            return False
        address = address.ipv4_mapped or address
    return address.is_global and not address.is_multicast


def _request(
    connection: _PinnedConnection, url: SplitResult, limit: int, deadline: float
) -> tuple[int, str | None, bytes]:
    """Return the status of an answer, the address that it redirects to, and its body."""
    target = quote((url.path or "/") + (f"?{url.query}" if url.query else ""), safe=string.printable)
    connection.connect()
    # The timer enforces the deadline, because a socket's timeout starts again with every byte that arrives.
    timer = threading.Timer(_seconds_left(deadline), _shut_down, [connection.sock])
    timer.daemon = True
    timer.start()
    try:
        connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "paceline"})
        answer = connection.getresponse()
        if answer.status != 200:
            return answer.status, answer.headers.get("location"), b""
        data = bytearray()
        while part := answer.read1(_CHUNK_BYTES):
            data += part
            if len(data) > limit:
                raise InvalidPrompt(f"the image must not exceed {limit} bytes", "Scale it down")
        _seconds_left(deadline)  # raise if the timer ended the data early
        return answer.status, None, bytes(data)
    finally:
        timer.cancel()


def _shut_down(opened: socket.socket) -> None:
    """Shut a socket down, so that no thread waits for it any longer."""
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)  # not the TLS shutdown, which would wait for the other side


def _seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline. Raise `InvalidPrompt` after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_slow()
    return left


def _malformed() -> InvalidPrompt:
    return InvalidPrompt("the image's URL is malformed", "Write https://host/path")


def _too_slow() -> InvalidPrompt:
    return InvalidPrompt(
        f"the images of the request did not arrive within {TOTAL_SECONDS:g} seconds",
        "Send the data of the images instead",
    )
