"""A request's body: read within limits, parsed strictly, validated. Whatever is wrong with it is the client's error,
never the server's."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
from fastapi import Request
from pydantic import BaseModel, ValidationError

from paceline.server.errors import ApiError, bad_request, invalid_body
from paceline.server.planning import LONG, Lane, Planning, client_of

_DEPTH = 100
"""Levels of nested lists and objects at most; real chats and JSON schemas have about ten."""
_VALUES = 200_000
"""Strings, lists and objects in one body at most. Numbers are not limited: a prompt may be a list of token ids."""
_PATIENCE = 10.0
"""Seconds within which a body must arrive, beside one second for each `_RATE` bytes that have arrived."""
_RATE = 100_000
_HEAVY = 1 << 20
"""Bytes of memory from which a parsed body counts, however few bytes it was sent in."""
_VALUE, _NUMBER = 100, 32
"""Bytes of memory that one value takes, about."""
_LARGEST = {int: 2**64 - 1, float: sys.float_info.max, bool: 1}

Body = TypeVar("Body", bound=BaseModel)


@dataclass(eq=False, slots=True)
class _Share:
    """Bytes that are held for one request. `arrival`: set while its body is arriving."""

    size: int = 0
    arrival: anyio.CancelScope | None = None
    dropped: bool = False

    def drop(self) -> None:
        assert self.arrival is not None
        self.size, self.dropped = 0, True
        self.arrival.cancel()


class Bodies:
    """Reads bodies. Bounds the bytes of each, and the bytes of all large ones that are arriving or being planned."""

    def __init__(self, planning: Planning, limit: int, total: int) -> None:
        """`limit`: bytes of one body. `total`: bytes of all large bodies at once, from their arrival until their
        requests are planned; once parsed, a body counts with the memory that it takes."""
        self._planning, self._limit, self._total = planning, limit, total
        self._shares: list[_Share] = []
        """The oldest first."""

    @asynccontextmanager
    async def read(self, request: Request, kind: type[Body]) -> AsyncIterator[tuple[Body, Lane]]:
        """Yield the body as a `kind`, and where a request of its size is to be planned. Its bytes count until the block
        is left.

        Raises `ApiError` 400, 408, 413 or 503, and starlette's `ClientDisconnect`.
        """
        _check_type(request.headers.get("content-type", ""))
        share = _Share()
        self._shares.append(share)
        try:
            data = await self._receive(request, share)
            lane: Lane = "long" if len(data) > LONG else "short"
            work = partial(_understood, data, kind)
            body, memory = work() if lane == "short" else await self._planning.run("parse", client_of(request), work)
            del data, work  # the request is planned without them
            if memory > _HEAVY:
                self._count(share, memory)
            yield body, lane
        finally:
            self._shares.remove(share)

    async def _receive(self, request: Request, share: _Share) -> bytes:
        """Return the whole body. Without a Content-Length (chunked) too, no more than the limit is kept."""
        too_long = ApiError(413, f"the body has more than {self._limit} bytes", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > self._limit:
            raise too_long
        data = bytearray()
        with anyio.CancelScope(deadline=anyio.current_time() + _PATIENCE) as arrival:
            share.arrival = arrival
            async for part in request.stream():
                data += part
                if len(data) > self._limit:
                    raise too_long
                arrival.deadline += len(part) / _RATE
                self._count(share, len(data))
        share.arrival = None
        if share.dropped:
            raise _crowded()
        if arrival.cancelled_caught:
            raise ApiError(
                408,
                f"the body arrived too slowly. It must arrive within {_PATIENCE:g} seconds and one more for each "
                f"{_RATE // 1000} kB",
                code="timeout",
            )
        return bytes(data)

    def _count(self, share: _Share, size: int) -> None:
        """Let a body count with `size` bytes; small ones do not count.

        Where all together are too many, those that have been arriving for longest are dropped: an honest body arrives
        at once, a stalled one never. Raises `ApiError` 503 where none is arriving.
        """
        if size <= LONG:
            return
        share.size = size
        others = [one for one in self._shares if one.size and one is not share]
        while others and size + sum(one.size for one in others) > self._total:
            oldest = next((one for one in others if one.arrival), None)
            if oldest is None:
                raise _crowded()
            oldest.drop()
            others.remove(oldest)


def _crowded() -> ApiError:
    return ApiError(
        503,
        "too many large requests are arriving at once. Send it again in a moment",
        code="too_many_bytes",
        headers={"Retry-After": "1"},
    )


def _understood(data: bytes, kind: type[Body]) -> tuple[Body, int]:
    """The body as a `kind`, and the bytes of memory that it takes."""
    body, memory = parse(data)
    try:
        return kind.model_validate(body), memory
    except ValidationError as error:
        raise invalid_body(body, error.errors(include_url=False, include_input=False)) from None


def _check_type(given: str) -> None:
    kind, _, parameters = given.lower().partition(";")
    name, _, charset = parameters.strip().partition("=")
    if kind.strip() != "application/json" or (name == "charset" and charset.strip('"') not in ("utf-8", "utf8")):
        raise bad_request("the content type must be application/json in UTF-8. Send Content-Type: application/json")


def parse(data: bytes) -> tuple[dict[str, Any], int]:
    """Return a JSON object, and about how many bytes of memory it takes.

    Raises `ApiError` 400 for anything else: duplicate keys, NaN, numbers beyond 64 bits, lone surrogates, endless
    nesting and too many values included.
    """
    try:
        body = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except ApiError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON in UTF-8 ({_reason(error)})") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body, len(data) + _check_values(body)


def _reason(error: ValueError) -> str:
    """What is wrong, without the body's own text, which belongs neither in replies nor in logs."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "bytes that are not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number that is too long"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise bad_request("the body has an object with two values for one key")
    return found


def _no_constant(name: str) -> Any:
    raise bad_request(f"the body holds {name}, which is not a JSON number")


def _too_deep() -> ApiError:
    return bad_request(f"the body is nested more than {_DEPTH} deep")


def _check_values(body: Any) -> int:
    """Return about how many bytes of memory the values take. Level by level, so that no depth is too much here."""
    level, numbers, seen = [body], 0, 0
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _check_text(value)
            else:
                _check_number(value)
                numbers += 1
        seen += len(level)
        if seen - numbers > _VALUES:
            raise bad_request(f"the body holds more than {_VALUES} strings, lists and objects")
        if not below:
            return (seen - numbers) * _VALUE + numbers * _NUMBER
        level = below
    raise _too_deep()


def _check_text(value: str) -> None:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_request("the body holds a lone surrogate, which is not text") from None


def _check_number(value: float | None) -> None:
    if value is not None and not -_LARGEST[type(value)] <= value <= _LARGEST[type(value)]:
        raise bad_request("the body holds a number too large for 64 bits")
