"""Who may ask, how much at once, and what is remembered of it: API keys, request ids, log lines."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import InvalidOption
from paceline.server.errors import LOG, REQUEST_ID, ApiError, api_error, respond
from paceline.server.worker import ServerStopping

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server is told about itself.

    model: its name in the API; `aliases`: further names that requests may give.
    api_keys: one of them must come as `Authorization: Bearer KEY`; none: everybody may ask.
    hosts: names that requests may be addressed to; none: any. Where there are no keys they keep out web pages whose own
    name was made to lead here (DNS rebinding).
    cors_origins: web origins whose pages may ask ("*": all); none: CORS is off.
    max_body: bytes of one body. max_bodies: bytes of all large bodies at once, from their arrival until their requests
    are planned. max_prompt: tokens of a prompt (None: the model's context). max_n: samples of one prompt. max_choices:
    replies to one request, over all its prompts. max_requests: requests that are being answered at once.
    timeout: seconds from its arrival that a request has if it says nothing (None: no limit). stall: seconds that a
    client may leave its stream unread before it is given up.
    log_prompts: write prompts into the log. trace_endpoint: where OpenTelemetry traces go (OTLP over HTTP).
    """

    model: str
    aliases: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body: int = 4 * 2**20
    max_bodies: int = 64 * 2**20
    max_prompt: int | None = None
    max_n: int = 16
    max_choices: int = 64
    max_requests: int = 256
    timeout: float | None = None
    stall: float = 30.0
    log_prompts: bool = False
    trace_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not all(name.strip() for name in (self.model, *self.aliases)):
            raise InvalidOption("a name of the model is empty", "Give --served-model-name a name")
        if not all(key.strip() for key in self.api_keys):
            raise InvalidOption("an API key is empty: everybody would have it", "Give one, or none at all")


def check_key(keys: Sequence[str], authorization: str) -> None:
    """Raises `ApiError` 401 unless a key is right; the time it takes does not tell how much of one was."""
    if not keys:
        return
    scheme, _, given = authorization.partition(" ")
    right = [hmac.compare_digest(key.encode(), given.strip().encode(errors="replace")) for key in keys]
    if scheme.lower() != "bearer" or not any(right):
        raise ApiError(
            401,
            "the API key is missing or wrong. Send Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def check_host(hosts: Sequence[str], given: str) -> None:
    """`given`: the Host header. Raises `ApiError` 403 unless it names one of `hosts`, whatever the port."""
    try:
        name = urlsplit(f"//{given}").hostname
    except ValueError:
        name = None
    if hosts and name not in hosts:
        raise ApiError(
            403,
            f"this server is not addressed as {given!r}. Start it with --allowed-host for that name, or with --api-key",
            code="unknown_host",
        )


@dataclass(slots=True)
class Gate:
    """Lets so many requests be answered at once, and no more."""

    most: int
    inside: int = field(default=0)

    def enter(self) -> None:
        """Raises `ApiError` 429. `leave` must follow."""
        if self.inside >= self.most:
            raise ApiError(
                429, f"{self.most} requests are being answered", code="too_many_requests", headers={"Retry-After": "1"}
            )
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1


class Logged:
    """ASGI middleware: a request id in and out, and one log line per request, without its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(Headers(scope=scope).get("x-request-id", ""))
        REQUEST_ID.set(name)
        began, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        except asyncio.CancelledError:  # by uvicorn, which stops and has waited long enough
            if not status:
                stopping = ServerStopping("the server is stopping", "Ask another one, or wait until it is back")
                await respond(api_error(stopping))(scope, receive, named)
        except Exception as error:
            if status:
                raise
            await respond(api_error(error))(scope, receive, named)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
            LOG.info("%s %s %s %d %.0f ms", name, scope["method"], path, status, 1000 * (time.monotonic() - began))


def _request_id(given: str) -> str:
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
