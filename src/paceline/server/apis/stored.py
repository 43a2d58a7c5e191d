"""/v1/responses/...: responses that later requests may continue, kept in memory up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

from fastapi import Request
from starlette.responses import Response

from paceline.server.api import dumps_long
from paceline.server.apis.responses_request import Item, image_chars, listed_item
from paceline.server.errors import ApiError

_MAX_COUNT, _MAX_BYTES = 4096, 64 * 2**20


_OBJECT_BYTES = 1000
"""Bytes of memory of one object, in addition to its text."""
_VALUE_BYTES = 64
"""Bytes of memory of one list, and of each further value in a list or object."""


def estimated_bytes(text: str) -> int:
    """Return about how many bytes of memory the values of this JSON take."""
    return len(text) + _OBJECT_BYTES * text.count("{") + _VALUE_BYTES * (text.count("[") + text.count(","))


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response.

    Attributes:
        document: The response as it was sent.
        input: The items of the request, without the items of earlier responses.
        previous: The id of the response that this one continues.
        size: Approximate bytes of memory.
        length: Approximate characters of the input and output items as JSON.
    """

    document: dict[str, Any]
    input: Sequence[Item]
    previous: str | None
    size: int
    length: int = 0

    def count(self, text: str) -> None:
        """Count more of the output, as JSON."""
        self.size += estimated_bytes(text)
        self.length += len(text)


class ResponseStore:
    """The latest responses. The least recently used are dropped first. Safe to use from any thread."""

    def __init__(self, max_bytes: int = _MAX_BYTES, max_count: int = _MAX_COUNT) -> None:
        self._max_bytes, self._max_count = max_bytes, max_count
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = RLock()
        self.bytes = 0

    def put(self, response: StoredResponse) -> None:
        """Keep a response, unless it is larger than the limit of the store."""
        if response.size > self._max_bytes:
            return
        with self._lock:
            self._kept[response.document["id"]] = response
            self.bytes += response.size
            while self.bytes > self._max_bytes or len(self._kept) > self._max_count:
                self.bytes -= self._kept.popitem(last=False)[1].size

    def get(self, name: str) -> StoredResponse:
        """Return a response. Raises `ApiError` 404."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        raise ApiError(
            404,
            f"the response {name!r:.200} is not stored. Responses are kept in memory, up to a limit, and are lost when "
            "the server stops",
            code="response_not_found",
        )

    def delete(self, name: str) -> None:
        """Forget a response. Raises `ApiError` 404."""
        with self._lock:
            self.bytes -= self.get(name).size
            del self._kept[name]

    def length(self, name: str | None) -> int:
        """Return the number of characters in the stored part of a conversation."""
        return sum(response.length for response in self._known(name))

    def has_images(self, name: str | None) -> bool:
        """Return True if the stored part of a conversation contains images."""
        return any(image_chars(response.input) for response in self._known(name))

    def _known(self, name: str | None) -> Iterator[StoredResponse]:
        """Yield a response and the stored responses that it continues, newest first."""
        while name is not None and (response := self._kept.get(name)):
            yield response
            name = response.previous

    def conversation(self, name: str | None, limit: int) -> list[StoredResponse]:
        """Return a response and the responses that it continues, oldest first. `limit`: maximum bytes of memory of all
        of them.

        Raises `ApiError` 400 if one is missing, or if they exceed the limit.
        """
        found: list[StoredResponse] = []
        size = 0
        while name is not None:
            try:
                found.append(self.get(name))
            except ApiError as error:
                raise ApiError(
                    400,
                    f"{error.message}. Send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            size += found[-1].size
            if size > limit:
                raise ApiError(
                    400,
                    "the stored conversation is too long. Send the part that matters as input",
                    param="previous_response_id",
                    code="context_length_exceeded",
                )
            name = found[-1].previous
        return found[::-1]


Document = Callable[[Request, Callable[[], Any]], Awaitable[Response]]


class ResponseRoutes:
    """Routes for stored responses, and for the input items of their requests."""

    def __init__(self, store: ResponseStore, document: Document) -> None:
        """`document`: answers a request with the result of a function."""
        self._store, self._document = store, document

    async def response(self, request: Request, response_id: str) -> Response:
        """Return a stored response."""
        document = self._store.get(response_id).document
        return await self._document(request, lambda: document)

    async def delete_response(self, response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        self._store.delete(response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the items of a stored response's request, the latest first."""
        items = self._store.get(response_id).input

        def listing() -> bytes:
            ids = [f"{response_id}_{i}" for i in range(len(items))][::-1]
            ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
            data = ({"id": name, **listed_item(item)} for name, item in zip(ids, reversed(items), strict=True))
            return dumps_long({"object": "list", "has_more": False, **ends}, "data", data)

        return await self._document(request, listing)
