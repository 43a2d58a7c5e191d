"""Request bodies: received within limits, parsed strictly, and validated. Faults in a body become 4xx errors."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from paceline.server.errors import ApiError, bad_request, invalid_body, retry_later
from paceline.server.limits import Settings
from paceline.server.preprocessing import MAX_SHORT_BODY, PoolName, Preprocessor, client_id
from paceline.server.schema import NamedBody

_MAX_DEPTH = 100
"""Levels of nested lists and objects; real chats and JSON schemas have about ten."""
_MAX_VALUES = 200_000
"""Strings, lists and objects in one body. Numbers are not limited: a prompt may be a list of token ids."""
_ARRIVAL_SECONDS = 10.0
"""Seconds within which a body must arrive, plus one second for each `_MIN_RATE` bytes that have arrived."""
_MIN_RATE = 100_000
_MIN_COUNTED_BYTES = 1 << 20
"""A parsed body counts with its memory if that exceeds this number of bytes, even if the body was sent in fewer
bytes."""
_VALUE_BYTES, _NUMBER_BYTES = 100, 32
"""Approximate memory of a string, list or object, and of any other value."""
_MAX_NUMBERS = {int: 2**64 - 1, float: sys.float_info.max, bool: 1}

Body = TypeVar("Body", bound=BaseModel)


@dataclass(eq=False, slots=True)
class _HeldBytes:
    """Bytes held for one request.

    Attributes:
        size: The number of bytes. 0 for small bodies, which do not count.
        arrival: The scope in which the body is received. None once the body has arrived.
        dropped: True if the body was dropped in favour of another body.
    """

    size: int = 0
    arrival: anyio.CancelScope | None = None
    dropped: bool = False

    def drop(self) -> None:
        assert self.arrival is not None
        self.size, self.dropped = 0, True
        self.arrival.cancel()


class BodyReader:
    """Reads request bodies. Limits the size of each body, and the total size of the large bodies that are arriving or
    whose requests are being prepared."""

    def __init__(self, preprocessor: Preprocessor, settings: Settings) -> None:
        """Make a reader.

        Args:
            preprocessor: Parses large bodies.
            settings: Limits on one body without its images, on the images in one body, and on all large bodies
                together. Once a body is parsed, its memory counts instead of its length.
        """
        self._preprocessor = preprocessor
        self._limit, self._total, self._images = settings.max_body, settings.max_bodies, settings.max_image_chars
        self._held: list[_HeldBytes] = []
        """The bodies of all requests that are arriving or being prepared, oldest first."""

    @asynccontextmanager
    async def read(
        self, request: Request, kind: type[Body], more: Mapping[str, Any] | None = None
    ) -> AsyncIterator[tuple[Body, PoolName]]:
        """Yield the body as a `kind`, and the pool for a request of its size. The body counts until the block is left.

        `more`: parameters that the path of the request holds. Raises `ApiError` 400, 408, 413 or 503, and starlette's
        `ClientDisconnect`.
        """
        _check_type(request.headers)
        async with self.receive(request) as (data, held):
            pool: PoolName = "long" if len(data) > MAX_SHORT_BODY else "short"
            work = partial(self._parsed, data, kind, more or {})
            run = partial(self._preprocessor.run, "parse", client_id(request))
            body, memory = work() if pool == "short" else await run(work)
            del data, work  # no longer needed while the request is prepared
            if memory > _MIN_COUNTED_BYTES:
                self._count(held, memory)
            yield body, pool

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[tuple[bytes, _HeldBytes]]:
        """Yield the body as bytes. They count towards the limit until the block is left. Raises `ApiError` 408, 413 or
        503, and `ClientDisconnect`."""
        held = _HeldBytes()
        self._held.append(held)
        try:
            yield await self._receive(request, held), held
        finally:
            self._held.remove(held)

    async def _receive(self, request: Request, held: _HeldBytes) -> bytes:
        """Return the whole body. A chunked body, which has no Content-Length, is also read only up to the limit."""
        most = self._limit + self._images
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > most:
            raise self._too_long()
        data = bytearray()
        with anyio.CancelScope(deadline=anyio.current_time() + _ARRIVAL_SECONDS) as arrival:
            held.arrival = arrival
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise self._too_long()
                arrival.deadline += len(part) / _MIN_RATE
                self._count(held, len(data))
        held.arrival = None
        if held.dropped:
            raise _too_many_bytes()
        if arrival.cancelled_caught:
            limit = f"{_ARRIVAL_SECONDS:g} seconds, plus one for each {_MIN_RATE // 1000} kB"
            raise ApiError(408, f"the body arrived too slowly. It must arrive within {limit}", code="timeout")
        return bytes(data)

    def _parsed(self, data: bytes, kind: type[Body], more: Mapping[str, Any]) -> tuple[Body, int]:
        """Return the body as a `kind`, and the bytes of memory that it takes. Raises `ApiError` 400 and 413."""
        if len(data) > self._limit and data.count(b",") > _MAX_VALUES:  # many numbers would take seconds to parse
            raise self._too_long()
        raw, memory = parse(data)
        body = validated({**raw, **more}, kind)
        if len(data) - (body.image_chars if isinstance(body, NamedBody) else 0) > self._limit:
            raise self._too_long()
        return body, memory

    def _too_long(self) -> ApiError:
        images = f" without its images, and its images must not exceed {self._images}" if self._images else ""
        return ApiError(413, f"the body must not exceed {self._limit} bytes{images}", code="body_too_large")

    def _count(self, held: _HeldBytes, size: int) -> None:
        """Count `size` bytes for a body. Small bodies do not count.

        If the total is exceeded, the bodies that have been arriving longest are dropped, because they are likely to be
        stalled. Raises `ApiError` 503 if no other large body is arriving.
        """
        if size <= MAX_SHORT_BODY:
            return
        held.size = size
        others = [other for other in self._held if other.size and other is not held]
        while others and size + sum(other.size for other in others) > self._total:
            oldest = next((other for other in others if other.arrival), None)
            if oldest is None:
                raise _too_many_bytes()
            oldest.drop()
            others.remove(oldest)


def _too_many_bytes() -> ApiError:
    return retry_later(503, "too many large requests at once. Try again in a moment", "too_many_bytes")


def validated(body: dict[str, Any], kind: type[Body]) -> Body:
    """Return the body as a `kind`. Raises `ApiError` 400."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid_body(body, error.errors(include_url=False, include_input=False)) from None


def _check_type(headers: Headers) -> None:
    """Raise `ApiError` 400 if a web page sends a body that is not declared as JSON.

    Before a browser sends JSON to another origin, it sends a CORS preflight, which the server can refuse. Without this
    check, a page could avoid the preflight by declaring its JSON as plain text. Browsers send `Origin` with every POST.
    Other clients do not, and many of them omit the content type, so their requests are not checked.
    """
    if "origin" not in headers and "sec-fetch-site" not in headers:
        return
    kind, _, parameters = headers.get("content-type", "").lower().partition(";")
    name, _, charset = parameters.strip().partition("=")
    if kind.strip() != "application/json" or (name == "charset" and charset.strip('"') not in ("utf-8", "utf8")):
        raise bad_request(
            "the content type of a web page's request must be application/json in UTF-8. "
            "Send Content-Type: application/json"
        )


def parse(data: bytes) -> tuple[dict[str, Any], int]:
    """Return a JSON object, and about how many bytes of memory it takes.

    Raises `ApiError` 400 for anything else, including duplicate keys, NaN, numbers beyond 64 bits outside of past
    calls, lone surrogates, excessive nesting and too many values.
    """
    try:
        body = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_reject_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise bad_request(f"the body must be valid JSON in UTF-8: {_reason(error)}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body, len(data) + _check_values(body)


def _reason(error: ValueError) -> str:
    """Describe a syntax error without quoting the body, which must not appear in responses or logs."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "bytes that are not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number that is too long"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise bad_request("an object in the body has the same key twice")
    return found


def _reject_constant(name: str) -> Any:
    raise bad_request(f"the body contains {name}, which is not a JSON number")


def _too_deep() -> ApiError:
    return bad_request(f"the body must not be nested deeper than {_MAX_DEPTH} levels")


def _check_values(body: Any) -> int:
    """Check all values, and estimate their memory in bytes. This goes level by level instead of recursively, so deep
    nesting cannot exhaust the stack."""
    level, in_calls, numbers, seen = [body], list[Any](), 0, 0
    for _ in range(_MAX_DEPTH):
        seen += len(level) + len(in_calls)
        level, arguments, count = _checked(level)
        in_calls, _, count_in_calls = _checked(in_calls, in_call=True)
        in_calls += arguments
        numbers += count + count_in_calls
        if seen - numbers > _MAX_VALUES:
            raise bad_request(f"the body must not have more than {_MAX_VALUES} strings, lists and objects")
        if not level and not in_calls:
            return (seen - numbers) * _VALUE_BYTES + numbers * _NUMBER_BYTES
    raise _too_deep()


def _checked(values: list[Any], in_call: bool = False) -> tuple[list[Any], list[Any], int]:
    """Check the texts and numbers of one level.

    Args:
        values: All values of the level.
        in_call: True for values within the arguments of past calls, where whole numbers may exceed 64 bits.

    Returns:
        The contents of their lists and objects, without the arguments of past calls; the arguments of past calls; and
        the number of numbers, booleans and nulls.
    """
    found, arguments, numbers = list[Any](), list[Any](), 0
    for value in values:
        if isinstance(value, dict):
            given = None if in_call else _past_arguments(value)
            arguments += [] if given is None else [given]
            found += value
            found += value.values() if given is None else [one for one in value.values() if one is not given]
        elif isinstance(value, list):
            found += value
        elif isinstance(value, str):
            _check_text(value)
        else:
            numbers += 1
            if (
                value is not None
                and abs(value) > _MAX_NUMBERS[type(value)]
                and not (in_call and isinstance(value, int))
            ):
                raise bad_request("the body contains a number too large for 64 bits")
    return found, arguments, numbers


def _past_arguments(value: Any) -> dict[str, Any] | None:
    """Return the arguments of a past call in Anthropic's or Ollama's shape. A model wrote them, possibly with large
    numbers, and the client cannot change them."""
    if not isinstance(value, dict):
        return None
    found = None
    if value.get("type") == "tool_use":
        found = value.get("input")
    elif isinstance(value.get("name"), str):
        found = value.get("arguments")
    return found if isinstance(found, dict) else None


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("the body contains a lone surrogate, which is not valid text") from None
