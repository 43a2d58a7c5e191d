"""Streams of answers from a replica on Ray, which may die before the stream ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.types import Message

from paceline.server.errors import api_error, dialect, retry_later


async def parts(stream: Any, messages: list[Message], path: str) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer. If its replica dies, the stream ends with an error in the format of the API."""
    try:
        while True:
            for message in messages:
                yield message.get("body", b"")
            messages = await anext(stream, [])
            if not messages:
                return
    except RayActorError as error:
        document = bytes(api_error(known(error)).response(path).body)
        if dialect(path) == "api":
            yield document + b"\n"
        else:
            yield b"event: error\n" * (dialect(path) == "messages") + b"data: " + document + b"\n\n"
    finally:
        stream.cancel()


def known(error: Exception) -> Exception:
    """Convert errors of Ray to the server's errors. Return all other errors unchanged."""
    if isinstance(error, BackPressureError):
        return retry_later(429, "all replicas are full", "queue_full")
    if isinstance(error, RayActorError):
        return retry_later(503, "the replica that wrote this reply has died. Send the request again", "replica_died")
    return error
