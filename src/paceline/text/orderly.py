"""Messages in the order that strict chat templates ask for.

Some templates refuse a second system message, two messages of the user in a row, a conversation that the assistant
begins, or any system message. Each form below says the same to the model and breaks fewer of these rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Chat = list[dict[str, Any]]


def forms(chat: Sequence[dict[str, Any]]) -> Iterator[Chat]:
    """Yield other forms of a chat, the closest to it first, for a template that refuses it.

    Args:
        chat: Checked messages, whose content is text.
    """
    known = [list(chat)]
    first = _merged(_system_first(chat))
    second = _alternating(first)
    for form in (first, second, _without_system(first), _without_system(second)):
        if form not in known:
            known.append(form)
            yield form


def _system_first(chat: Sequence[dict[str, Any]]) -> Chat:
    """Return the chat with its system messages before all others."""
    return sorted(chat, key=lambda message: message["role"] != "system")


def _merged(chat: Sequence[dict[str, Any]]) -> Chat:
    """Return the chat with neighbours of one role as one message. Tool results, and what follows a call, stay."""
    merged: Chat = []
    for message in chat:
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] != "tool" and not last.get("tool_calls"):
            merged[-1] = _joined(last, message)
        else:
            merged.append(message)
    return merged


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both messages as one. Their texts become paragraphs."""
    return {**first, **second, "content": "\n\n".join(filter(None, (first["content"], second["content"])))}


def _without_system(chat: Sequence[dict[str, Any]]) -> Chat:
    """Return a merged chat whose system text stands before the user's first text."""
    if not chat or chat[0]["role"] != "system":
        return list(chat)
    system, others = {**chat[0], "role": "user"}, chat[1:]
    user = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if user is None:
        return [system, *others]
    return [*others[:user], {**others[user], "content": _joined(system, others[user])["content"]}, *others[user + 1 :]]


def _alternating(chat: Sequence[dict[str, Any]]) -> Chat:
    """Return a merged chat in which the user begins, and what the user says after tool results is part of the last
    result."""
    turns: Chat = []
    for message in chat:
        last = turns[-1] if turns else {}
        if last.get("role", "system") == "system" and message["role"] == "assistant":
            turns.append({"role": "user", "content": ""})
        if message["role"] == "user" and last.get("role") == "tool":
            turns[-1] = {**last, "content": _joined(last, message)["content"]}
        else:
            turns.append(message)
    return turns
