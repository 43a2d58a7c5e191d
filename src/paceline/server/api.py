"""Base classes of an API for generated text: `Api` decodes request bodies, and `Encoder` encodes the replies.

docs/how-to/own-api.md shows how to add one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

from paceline.server.errors import ApiError, ContextExceeded
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import PreparedRequest, prepare
from paceline.server.preprocessing import PoolName
from paceline.server.replies import ChatReply, Usage
from paceline.server.request import GenerateRequest
from paceline.server.schema import Generating
from paceline.server.worker import ReplyJob, ReplyRound

Event = dict[str, Any]
Body = TypeVar("Body", bound=Generating)

_SLICE = 1000
"""Number of items that one call of `json.dumps` encodes. The call takes at most a millisecond, during which it holds
the GIL, so no other thread runs."""


class Encoder(ABC):
    """Encodes the replies to one request in the format of one API, as a document or as a stream of events.

    Attributes:
        media_type: The media type of streams.
        last: The bytes that end a complete stream.
        is_complete: True if no further text will be shown, so that the replies can be cancelled.
        shows_progress: True if the client asked for the progress of its prompt.
    """

    media_type: ClassVar[str] = "text/event-stream"
    last: ClassVar[bytes] = b""
    is_complete: bool = False
    shows_progress: bool = False

    def begin(self, usage: Usage) -> Sequence[Event]:
        """Return the events before the first round. By default there are none."""
        return ()

    @abstractmethod
    def add(self, round_: ReplyRound) -> Sequence[Event]:
        """Add a round, which has at least one chunk, and return its events."""

    @abstractmethod
    def heartbeat(self) -> Event:
        """Return an empty event, which keeps an idle stream alive."""

    def progress(self, usage: Usage) -> Event:
        """Return an event that reports how much of the prompt has been processed. By default it is a heartbeat."""
        return self.heartbeat()

    @abstractmethod
    def end(self, usage: Usage) -> Sequence[Event]:
        """End the answer, and return the events after the last round."""

    @abstractmethod
    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer, after `end`."""

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream early. By default it is an error in OpenAI's
        format."""
        return error.body

    def encode(self, event: Event) -> bytes:
        """Return the bytes of a server-sent event. The event's `type`, if there is one, becomes its name."""
        name = f"event: {event['type']}\n".encode() if "type" in event else b""
        return name + b"data: " + dumps(event) + b"\n\n"


class Api(ABC, Generic[Body]):
    """An API for generated text.

    The class of the request bodies must have two properties: `constrained` (True if the reply needs a grammar) and
    `image_chars` (number of base64 characters of all images). The checklist in docs/how-to/own-api.md lists further
    places to change, such as the format of errors.

    Attributes:
        path: The path of the requests.
        body: The pydantic class of the request bodies.
        id_prefix: The beginning of an answer's id.
        about: The description of the endpoint in the OpenAPI document.
        media_type: The media type of streams. "" if the API has none.
    """

    path: ClassVar[str]
    body: type[Body]
    id_prefix: ClassVar[str] = ""
    about: ClassVar[str]
    media_type: ClassVar[str] = "text/event-stream"

    def of_path(self, values: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the parameters of the body that the path contains. `values`: name in braces -> text in the path."""
        return {}

    @abstractmethod
    def decode(self, body: Body) -> GenerateRequest | None:
        """Return the request, None if there is nothing to generate. Runs in a thread. Raises `ApiError`."""

    @abstractmethod
    def encoder(self, body: Body, prepared: PreparedRequest) -> Encoder:
        """Return the encoder of an answer, which must not keep the body. Runs in a thread."""

    def pool(self, body: Body, by_size: PoolName) -> PoolName:
        """Return the thread pool that prepares a request. `by_size`: the pool for the size of its body."""
        if body.image_chars:
            return "images"
        return "grammar" if body.constrained else by_size

    def unloads(self, body: Body) -> bool:
        """Return True if the model is unloaded after the reply."""
        return False

    def without_reply(self, body: Body) -> Event | None:
        """Return the answer to a request that only unloads the model. None for any other request."""
        return None

    def overflown(self, body: Body, prepared: PreparedRequest, error: ContextExceeded) -> Encoder:
        """Return the encoder of the answer to a prompt that is too long. By default, `error` is raised, and
        becomes the answer."""
        raise error

    def prepare(
        self, settings: Settings, body: Body, model: LoadedModel, answer_id: str
    ) -> tuple[Sequence[ReplyJob], Encoder]:
        """Return the jobs of a request, and the encoder of its answer. Raises `PacelineError` and `ApiError`."""
        request = self.decode(body)
        try:
            prepared = prepare(model, settings, request, answer_id)
        except ContextExceeded as error:
            return [], self.overflown(body, PreparedRequest(answer_id, model, [], [ChatReply()]), error)
        encoder = self.encoder(body, prepared)  # must come before `prepared.jobs`, because the encoder may replace jobs
        return prepared.jobs, encoder


def dumps(data: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def dumps_long(about: Event, name: str, items: Iterable[Any]) -> bytes:
    """Return an object with a long list as JSON. Other threads may run between the list's slices.

    Args:
        about: The other entries of the object, at least one.
        name: The key of the list.
        items: The items of the list.
    """
    remaining, slices = iter(items), []
    while part := list(islice(remaining, _SLICE)):
        slices.append(dumps(part)[1:-1])
    return dumps(about)[:-1] + b"," + dumps(name) + b":[" + b",".join(slices) + b"]}"
