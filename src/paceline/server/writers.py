"""Writers: a request's replies in the shape of one API, whole or as a stream of events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from paceline.server.errors import ApiError
from paceline.server.usage import Usage
from paceline.server.worker import ReplyJob, ReplyRound

Event = dict[str, Any]

_SLICE = 1000
"""Items of a long list that are encoded at once: a millisecond or less, in which no other thread runs."""


class Writer(ABC):
    """Replies to one request as they grow. `last`: what a stream that was not cut short ends with. `over`: the rest
    would not be shown, so the replies end."""

    media_type: ClassVar[str] = "text/event-stream"
    last: ClassVar[bytes] = b""
    over: bool = False

    @abstractmethod
    def begin(self, usage: Usage) -> Sequence[Event]:
        """Return the events before the first round."""

    @abstractmethod
    def add(self, round_: ReplyRound) -> Sequence[Event]:
        """Add a round, and return its events."""

    @abstractmethod
    def heartbeat(self) -> Event:
        """Return an event that adds nothing, for a stream that is silent."""

    @abstractmethod
    def end(self, usage: Usage) -> Sequence[Event]:
        """End the answer, and return the events after the last round."""

    @abstractmethod
    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer, after `end`."""

    @abstractmethod
    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream early."""

    def encode(self, event: Event) -> bytes:
        """Return an event's bytes: a server-sent event, named by its type if it has one."""
        name = f"event: {event['type']}\n".encode() if "type" in event else b""
        return name + b"data: " + dumps(event) + b"\n\n"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The jobs of a request, and the writer of its answer, made from the answer's id."""

    jobs: Sequence[ReplyJob]
    writer: Callable[[str], Writer]


def dumps(data: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def dumps_long(about: Event, name: str, items: Iterable[Any]) -> bytes:
    """Return `about`, which is not empty, with a long list added under `name`, as JSON.

    Other threads may run between the list's slices.
    """
    remaining, slices = iter(items), []
    while part := list(islice(remaining, _SLICE)):
        slices.append(dumps(part)[1:-1])
    return dumps(about)[:-1] + b"," + dumps(name) + b":[" + b",".join(slices) + b"]}"
