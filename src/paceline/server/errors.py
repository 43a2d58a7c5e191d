"""Errors in the shape that OpenAI's clients know: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
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
    one_line,
)
from paceline.server.worker import Busy, ServerStopping

LOG = logging.getLogger("paceline.server")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the request being answered; every log line about it begins with it."""

_UNKNOWN = "extra_forbidden"
_CLIENT_CLOSED_REQUEST = 499


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response.

    Attributes:
        status: The HTTP status.
        message: The message.
        param: The path of the wrong parameter, such as "messages.0.role".
        code: OpenAI's error code.
        headers: Headers of the response.
        details: The `details` of Anthropic's error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.details = status, message, param, code, details
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def ollama(self) -> str:
        """The message of the response in Ollama's shape."""
        return self.message

    @property
    def anthropic(self) -> dict[str, Any]:
        """The JSON document of the response in Anthropic's shape."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        if self.details:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": REQUEST_ID.get()}

    def response(self, path: str) -> JSONResponse:
        """The whole response, in the shape of the API that `path` belongs to."""
        others: dict[str, dict[str, Any]] = {"messages": self.anthropic, "api": {"error": self.ollama}}
        return JSONResponse(others.get(dialect(path), self.body), self.status, self.headers)


class WrongParameter(ValueError):
    """A wrong parameter, found by a validator of the whole body. `param`: its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(ApiError):
    """The error response for a prompt that is too long.

    Do not change the wording: some clients recognise it, and then shorten the conversation. litellm, Cline and others
    look for OpenAI's message, Claude Code looks for Anthropic's.
    """

    def __init__(self, size: int, limit: int, param: str, exact: bool = True) -> None:
        """Make the response.

        Args:
            size: Tokens of the prompt, or a lower bound.
            limit: Maximum tokens of the context.
            param: The parameter with the prompt.
            exact: True if `size` is exact, because the prompt has been tokenised.
        """
        message = (
            f"This model's maximum context length is {limit} tokens. However, the prompt resulted in "
            f"{'' if exact else 'at least '}{size} tokens. Shorten it"
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.size, self._limit = size, limit

    @property
    def ollama(self) -> str:
        """The message, which begins with Ollama's."""
        return f"the input length exceeds the context length. {self.message}"

    @property
    def anthropic(self) -> dict[str, Any]:
        """The document with Anthropic's message."""
        document = super().anthropic
        document["error"]["message"] = f"prompt is too long: {self.size} tokens > {self._limit} maximum"
        return document


def dialect(path: str) -> str:
    """Return the API that a path belongs to: "messages" (Anthropic's), "api" (Ollama's), or "openai"."""
    if path.startswith("/v1/messages"):
        return "messages"
    return "api" if path.startswith("/api/") else "openai"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An error of status 400."""
    return ApiError(400, message, param=param, code=code)


def retry_later(status: int, message: str, code: str, seconds: int = 1) -> ApiError:
    """An error with the header Retry-After."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})


def invalid_body(body: Any, errors: Sequence[Any]) -> ApiError:
    """The error response for a body that pydantic rejected, about the error with the most specific location."""
    paths = [_path(body, error["loc"], error["type"] == "missing") for error in errors]

    def specificity(i: int) -> tuple[bool, int, bool]:
        """In a union, the error of the member that accepts the value's type is the most useful."""
        kind = errors[i]["type"]
        return kind == _UNKNOWN, len(paths[i]), not kind.endswith("_type")

    most = max(range(len(paths)), key=specificity)
    error, param = errors[most], ".".join(map(str, paths[most]))
    message = "unknown parameter" if error["type"] == _UNKNOWN else error["msg"].removeprefix("Value error, ")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, WrongParameter):
        return bad_request(message, cause.param)
    return bad_request(f"{param}: {message}" if param else message, param or None)


def _path(body: Any, location: Sequence[str | int], missing: bool) -> list[str | int]:
    """Return pydantic's location as a path in the body, without the names of the union members that pydantic tried.

    `missing`: True if the last step is a key that the body lacks.
    """
    path: list[str | int] = []
    for i, step in enumerate(location):
        in_list = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if in_list or (isinstance(body, dict) and step in body):
            path, body = [*path, step], body[step]
        elif missing and i == len(location) - 1:
            path = [*path, step]
    return path


def api_error(error: Exception) -> ApiError:
    """Return the error response for any exception. Unexpected ones are logged, and their details are not sent."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case Busy():
            return retry_later(429, message, "queue_full")
        case ServerStopping():
            return retry_later(503, message, "shutting_down", 5)
        case PromptTooLong():
            return bad_request(message, code="context_length_exceeded")
        case WrongParameter():
            return bad_request(message, error.param)
        case InvalidOption():
            return bad_request(message, _API_NAMES.get(error.param or "", error.param))
        case InvalidPrompt() | NoTokenLeft():
            return bad_request(message)
        case TimedOut():
            return ApiError(504, message, param="timeout", code="timeout", headers={"x-should-retry": "false"})
        case OutOfMemory():
            return ApiError(503, message, code="out_of_memory")
        case PacelineError():
            return ApiError(500, message, code=type(error).__name__)
    LOG.error("%s unexpected error", REQUEST_ID.get(), exc_info=error)
    return ApiError(500, "internal error, see the server's log", code="internal_error")


_API_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "logprobs": "top_logprobs"}
"""Parameter of the library -> its name in the API, if the names differ."""


def install(app: FastAPI) -> None:
    """Answer every failed request in the shape of its API."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.method == "OPTIONS" and error.status_code == 405:  # a probe
            return Response(status_code=204, headers=error.headers)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        failed = ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        return failed.response(request.url.path)

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        answer = api_error(error)
        outcome = "refused" if answer.status < 500 else "failed"
        LOG.info("%s %s: %s", REQUEST_ID.get(), outcome, one_line(answer.message, 300))
        return answer.response(request.url.path)

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # the client has left, so only the log shows this status

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    for kind in (ApiError, WrongParameter, PacelineError):
        app.add_exception_handler(kind, on_error)
