"""Reorders messages for strict chat templates.

Some templates reject a second system message, two consecutive user messages, a conversation that begins with the
assistant, or any system message. Each of the forms here has the same meaning for the model, and breaks fewer of these
rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Chat = list[dict[str, Any]]


def alternative_chats(chat: Sequence[dict[str, Any]]) -> Iterator[Chat]:
    """Yield other forms of a chat that a template rejects. The most similar form comes first.

    Args:
        chat: Checked messages whose content is text.
    """
    known = [list(chat)]
    first = _merged(sorted(chat, key=lambda message: message["role"] != "system"))
    second = _alternating(first)
    for form in (first, second, _without_system(first), _without_system(second)):
        if form not in known:
            known.append(form)
            yield form


def _merged(chat: Sequence[dict[str, Any]]) -> Chat:
    """Merge consecutive messages of the same role, except tool results and messages after a call."""
    merged: Chat = []
    for message in chat:
        last = merged[-1] if merged else {}
        if last.get("role") == message["role"] != "tool" and not last.get("tool_calls"):
            merged[-1] = _joined(last, message)
        else:
            merged.append(message)
    return merged


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two messages. Their texts become paragraphs. Messages with images keep all parts."""
    both = first["content"], second["content"]
    if any(isinstance(content, list) for content in both):
        parts = [part for one in both for part in (one if isinstance(one, list) else [{"type": "text", "text": one}])]
        return {**first, **second, "content": parts}
    return {**first, **second, "content": "\n\n".join(filter(None, (first["content"], second["content"])))}


def _without_system(chat: Sequence[dict[str, Any]]) -> Chat:
    """Move the system text of a merged chat to the beginning of the user's first message."""
    if not chat or chat[0]["role"] != "system":
        return list(chat)
    system, others = {**chat[0], "role": "user"}, chat[1:]
    user = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if user is None:
        return [system, *others]
    return [*others[:user], {**others[user], "content": _joined(system, others[user])["content"]}, *others[user + 1 :]]


def _alternating(chat: Sequence[dict[str, Any]]) -> Chat:
    """Return a merged chat that begins with the user. User messages after tool results are moved into the last
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
