"""Errors in the shape that OpenAI's clients know: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.errors import (
    InvalidOption,
    InvalidPrompt,
    NoTokenLeft,
    OutOfMemory,
    PacelineError,
    PromptTooLong,
    TimedOut,
)
from paceline.server.worker import Busy, ServerStopping

LOG = logging.getLogger("paceline.server")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that is being answered; it stands in every log line about it."""

_UNKNOWN = "extra_forbidden"
_GONE = 499
"""The client has closed the connection: this status is only seen in the log."""


class ApiError(Exception):
    """What a client is told. `param`: the parameter at fault, as a path such as "messages.0.role"."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid_body(body: Any, errors: Sequence[Any]) -> ApiError:
    """The error of a body that pydantic refuses: the one of its errors that reaches deepest."""
    paths = [_path(body, error["loc"], error["type"] == "missing") for error in errors]

    def telling(i: int) -> tuple[bool, int, bool]:
        """Of the members of a union the one that has the value's type says more than those that have another."""
        kind = errors[i]["type"]
        return kind == _UNKNOWN, len(paths[i]), not kind.endswith("_type")

    deepest = max(range(len(paths)), key=telling)
    error, param = errors[deepest], ".".join(map(str, paths[deepest]))
    said = "there is no such parameter" if error["type"] == _UNKNOWN else error["msg"].removeprefix("Value error, ")
    if not param:
        # What concerns several parameters begins with the name of one.
        first = said.partition(" ")[0]
        return bad_request(said, first if isinstance(body, dict) and first in body else None)
    return bad_request(f"{param}: {said}", param)


def _path(body: Any, location: Sequence[str | int], missing: bool) -> list[str | int]:
    """Where in the body an error is: pydantic's location without the names of the union members it tried.

    `missing`: its last step is a key that should be there.
    """
    path: list[str | int] = []
    for at, step in enumerate(location):
        inside = isinstance(step, int) and step < len(body) if isinstance(body, list) else False
        if inside or (isinstance(body, dict) and step in body):
            path, body = [*path, step], body[step]
        elif missing and at == len(location) - 1:
            path = [*path, step]
    return path


def api_error(error: Exception) -> ApiError:
    """What to tell a client about any exception. One that nobody expected is not told in detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": _seconds(error.retry)})
    if isinstance(error, ServerStopping):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, PromptTooLong):
        return bad_request(str(error), code="context_length_exceeded")
    if isinstance(error, (InvalidOption, InvalidPrompt, NoTokenLeft)):
        return bad_request(str(error), _named(str(error)))
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), param="timeout", code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory")
    if isinstance(error, PacelineError):
        return ApiError(500, str(error), code=type(error).__name__)
    LOG.error("%s unexpected error", REQUEST_ID.get(), exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


_OPTION = re.compile(r"([a-z]+(?:_[a-z]+)*)(?:\[[^\]]*\])?(?:=| is | holds )")
_OURS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "logprobs": "top_logprobs"}


def _named(message: str) -> str | None:
    """The parameter that a message of the library begins with, by its name in the API."""
    found = _OPTION.match(message)
    return _OURS.get(found[1], found[1]) if found else None


def _one_line(message: str) -> str:
    """For the log: a client's own words, which a message may hold, begin no line of their own there."""
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    return line if len(line) <= 300 else line[:300] + "..."


def _seconds(wait: float) -> str:
    return str(max(1, round(wait)))


def respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def install(app: FastAPI) -> None:
    """Every failure of a request in one shape."""

    async def on_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return respond(ApiError(error.status_code, str(error.detail), code=code, headers=error.headers))

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        told = api_error(error)
        outcome = "refused" if told.status < 500 else "failed"
        LOG.info("%s %s: %s", REQUEST_ID.get(), outcome, _one_line(told.message))
        return respond(told)

    async def on_leaving(_: Request, error: Exception) -> Response:
        return Response(status_code=_GONE)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_leaving)
    for kind in (ApiError, PacelineError, Busy, ServerStopping):
        app.add_exception_handler(kind, on_error)
