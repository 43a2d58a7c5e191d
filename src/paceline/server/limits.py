"""Server settings, access checks, the limit on concurrent requests, and the request log."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import InvalidOption
from paceline.server.errors import LOG, REQUEST_ID, ApiError, api_error, retry_later
from paceline.server.worker import ServerStopping

STALL_SECONDS = 30.0
"""Seconds without reading after which a client is disconnected."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of a server.

    Attributes:
        api_keys: Accepted keys. A request must send one as `Authorization: Bearer KEY`. Empty for no authentication.
        hosts: Accepted values of the Host header. Empty for any. The check blocks DNS rebinding: a web page whose
            host name resolves to this server could otherwise send it requests as if they came from the same origin.
        cors_origins: Origins of web pages that may send requests, "*" for all. Empty to turn CORS off.
        max_body: Maximum bytes of a body without its images.
        max_bodies: Maximum bytes of all large bodies together, from their arrival until their requests are prepared.
        max_images: Maximum number of images in a request.
        max_image_bytes: Maximum bytes of all images in a request.
        image_hosts: Hosts from which images are fetched. "*" matches any part of a name. Empty to fetch none.
        max_prompt: Maximum tokens of a prompt. None for the model's context length.
        max_n: Maximum replies to one prompt.
        max_choices: Maximum replies to a request, over all its prompts.
        max_requests: Maximum requests in progress.
        timeout: Default seconds for a request, counted from its arrival. None for no limit.
        stall: Seconds that a client may leave its stream unread before it is disconnected.
        heartbeat: Seconds without an event after which a stream sends an empty event.
        log_prompts: True to write prompts to the log.
        trace_endpoint: URL for OpenTelemetry traces (OTLP over HTTP).
    """

    api_keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body: int = 4 * 2**20
    max_bodies: int = 128 * 2**20
    max_images: int = 64
    max_image_bytes: int = 24 * 2**20
    image_hosts: Sequence[str] = ()
    max_prompt: int | None = None
    max_n: int = 16
    max_choices: int = 64
    max_requests: int = 256
    timeout: float | None = None
    stall: float = STALL_SECONDS
    heartbeat: float = 10.0
    log_prompts: bool = False
    trace_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise InvalidOption("an API key must not be empty", "Give a key, or leave out --api-key")
        if self.timeout is not None and self.timeout <= 0:
            raise InvalidOption(f"timeout must be > 0 seconds, got {self.timeout}", "Pass None for no limit")

    @property
    def max_image_chars(self) -> int:
        """Maximum number of base64 characters of all images in a request, with an allowance for the beginnings of data
        URLs."""
        return -(-self.max_image_bytes // 3) * 4 + 100 * self.max_images


def authorization(headers: Headers) -> str:
    """Return the `Authorization` header of a request, or Anthropic's `X-Api-Key` in the form `Bearer KEY`."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


def check_key(keys: Sequence[str], authorization: str) -> None:
    """Raise `ApiError` 401 unless the header holds one of the keys. Without keys, every request is accepted."""
    if not keys:
        return
    if authorization.partition(" ")[0].lower() != "bearer" or not any(_matches(keys, authorization)):
        raise ApiError(
            401,
            "the API key is missing or wrong. Send Authorization: Bearer KEY, or X-Api-Key: KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def key_index(keys: Sequence[str], authorization: str) -> int:
    """Return the index of the key in an accepted header, or 0 if the server has no keys."""
    return next((number for number, same in enumerate(_matches(keys, authorization)) if same), 0)


def _matches(keys: Sequence[str], authorization: str) -> list[bool]:
    """Compare the header with each key, in a time that does not depend on where they differ."""
    given = authorization.partition(" ")[2].strip().encode(errors="replace")
    return [hmac.compare_digest(key.encode(), given) for key in keys]


def check_host(hosts: Sequence[str], header: str) -> None:
    """Raise `ApiError` 403 unless the Host header names one of `hosts`, with any port."""
    try:
        name = urlsplit(f"//{header}").hostname
    except ValueError:
        name = None
    if hosts and name not in hosts:
        raise ApiError(
            403,
            f"the host {header!r} is not allowed. Start the server with --allowed-host for it, or with --api-key",
            code="unknown_host",
        )


class RequestLimit:
    """Limit on concurrent requests. `what`: the error message after "N requests"."""

    def __init__(self, limit: int, what: str = "are already in progress") -> None:
        self._limit, self._what, self._active = limit, what, 0

    def acquire(self) -> None:
        """Increment the number of requests; `release` must follow. Raises `ApiError` 429."""
        if self._active >= self._limit:
            raise retry_later(429, f"{self._limit} requests {self._what}", "too_many_requests")
        self._active += 1

    def release(self) -> None:
        """Decrement the number of requests."""
        self._active -= 1


class RequestLog:
    """ASGI middleware that takes or makes a request id, returns it in the response, and logs one line per request
    without any text of the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id):
            request_id = uuid.uuid4().hex
        REQUEST_ID.set(request_id)
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by uvicorn, at the end of its graceful shutdown
            if not status:
                await api_error(ServerStopping()).response(scope["path"])(scope, receive, send_with_id)
        except Exception as error:  # `api_error` logs unexpected ones with their traceback
            if status:
                raise
            await api_error(error).response(scope["path"])(scope, receive, send_with_id)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
            LOG.info(
                "%s %s %s %d %.0f ms", request_id, scope["method"], path, status, 1000 * (time.monotonic() - began)
            )
