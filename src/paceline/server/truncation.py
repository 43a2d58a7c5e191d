"""Chats that are too long, without their oldest messages: Ollama's default, and an option of OpenAI's Responses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from paceline.server.errors import LOG, REQUEST_ID
from paceline.server.schema import ChatRequest, Message

_SHARE = 4
"""A reply of any length gets this part of the context, where messages must be left out anyway."""


def truncated(body: ChatRequest, size: Callable[[ChatRequest], int], limit: int) -> ChatRequest:
    """Return a chat without its oldest messages, as few as it takes for the prompt and a reply to fit.

    Instructions and the last message stay, and the first message that stays is no tool result.

    Args:
        body: A chat that is too long.
        size: Returns the tokens of a chat's prompt.
        limit: The most tokens of a prompt.
    """
    messages, wanted = body.messages, body.length
    room = limit - min(limit // _SHARE, wanted if wanted and wanted > 0 else limit)
    last = len(messages) - 1
    starts = [i for i in range(1, last + 1) if i == last or messages[i].role in ("user", "assistant")]

    def without(start: int) -> ChatRequest:
        return body.model_copy(update={"messages": _from(messages, start)})

    # The later the start, the shorter the prompt.
    index = bisect_left(starts, True, key=lambda start: size(without(start)) <= room)
    if not starts:
        return body
    shorter = without(starts[min(index, len(starts) - 1)])
    count = len(messages) - len(shorter.messages)
    LOG.warning(
        "%s the prompt exceeds %d tokens: the oldest %d of %d messages are left out",
        REQUEST_ID.get(),
        limit,
        count,
        len(messages),
    )
    return shorter


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the messages from `start` on, after all instructions."""
    return [m for i, m in enumerate(messages) if i >= start or m.role in ("system", "developer")]
