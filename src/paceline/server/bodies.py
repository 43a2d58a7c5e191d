"""A request's body: read up to a limit, taken apart strictly, checked against a model. Whatever is wrong with it is the
client's error, never the server's."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from paceline.server.errors import ApiError, bad_request, invalid_body
from paceline.server.planning import LONG, Lane, Planning, client_of

_DEPTH = 100
"""Lists and objects within each other at most; a chat or a JSON schema of people's has some ten."""
_SECONDS = 60.0
"""A body that takes longer to arrive is not waited for."""
_LARGEST = {int: 2**64 - 1, float: sys.float_info.max, bool: 1}

Body = TypeVar("Body", bound=BaseModel)


class Bodies:
    """Reads bodies: each up to a limit, and no more bytes of all of them at once than another one."""

    def __init__(self, planning: Planning, limit: int, total: int) -> None:
        """`limit`: bytes of one body. `total`: bytes of all large ones that are being read or understood."""
        self._planning, self._limit, self._total = planning, limit, total
        self._held = 0

    async def read(self, request: Request, kind: type[Body]) -> tuple[Body, Lane]:
        """The body as a `kind`, and where a request of its size is to be planned.

        Raises `ApiError` 400, 408, 413 or 503, and starlette's `ClientDisconnect`.
        """
        _check_type(request.headers.get("content-type", ""))
        data = bytearray()
        try:
            await asyncio.wait_for(self._receive(request, data), _SECONDS)
            lane: Lane = "long" if len(data) > LONG else "short"
            if lane == "short":
                return _understood(bytes(data), kind), lane
            return await self._planning.run("parse", client_of(request), lambda: _understood(bytes(data), kind)), lane
        except asyncio.TimeoutError:  # another class until Python 3.11
            raise ApiError(408, f"the body did not arrive within {_SECONDS:g} seconds", code="timeout") from None
        finally:
            self._held -= _counted(len(data))

    async def _receive(self, request: Request, data: bytearray) -> None:
        """Adds to `data` what arrives. Without a Content-Length (chunked) too, no more than the limit is kept."""
        too_long = ApiError(413, f"the body has more than {self._limit} bytes", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > self._limit:
            raise too_long
        async for part in request.stream():
            before = _counted(len(data))
            data += part
            self._held += _counted(len(data)) - before
            if len(data) > self._limit:
                raise too_long
            if self._held > self._total:
                raise ApiError(
                    503,
                    "too many large requests are arriving at once. Send it again in a moment",
                    code="too_many_bytes",
                    headers={"Retry-After": "1"},
                )


def _counted(size: int) -> int:
    """Bytes that count: small bodies are always welcome."""
    return size if size > LONG else 0


def _understood(data: bytes, kind: type[Body]) -> Body:
    body = parse(data)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid_body(body, error.errors(include_url=False, include_input=False)) from None


def _check_type(given: str) -> None:
    kind, _, parameters = given.lower().partition(";")
    name, _, charset = parameters.strip().partition("=")
    if kind.strip() != "application/json" or (name == "charset" and charset.strip('"') not in ("utf-8", "utf8")):
        raise bad_request("the content type is not application/json in UTF-8. Send Content-Type: application/json")


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises `ApiError` 400 for anything else: duplicate keys, NaN, numbers beyond 64 bits, lone
    surrogates and endless nesting included."""
    try:
        body = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except ApiError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise bad_request(f"the body is no JSON in UTF-8 ({_reason(error)})") from None
    if not isinstance(body, dict):
        raise bad_request("the body is no JSON object")
    _check_values(body)
    return body


def _reason(error: ValueError) -> str:
    """Without the body's own text, which belongs neither into replies nor into logs."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "bytes that are no UTF-8" if isinstance(error, UnicodeDecodeError) else "a number that is too long"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise bad_request("the body has an object with two values for one key")
    return found


def _no_constant(name: str) -> Any:
    raise bad_request(f"the body holds {name}, which is no JSON number")


def _too_deep() -> ApiError:
    return bad_request(f"the body is nested more than {_DEPTH} deep")


def _check_values(body: Any) -> None:
    """Level by level, so that no depth is too much for the check itself."""
    level = [body]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                below += value
            else:
                _check_value(value)
        level = below
        if not level:
            return
    raise _too_deep()


def _check_value(value: Any) -> None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_request("the body holds a lone surrogate, which is no text") from None
    elif isinstance(value, (int, float)) and not -_LARGEST[type(value)] <= value <= _LARGEST[type(value)]:
        raise bad_request("the body holds a number too large for 64 bits")
