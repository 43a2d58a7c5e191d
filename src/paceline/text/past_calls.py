"""Converts earlier tool calls of a conversation to a form that the chat template accepts.

Another server or model may have written these calls. The conversation must be able to go on even if a call was cut off,
or if the template accepts calls in only one form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.text import loose_json
from paceline.text.growing import Malformed

Chat = list[dict[str, Any]]

INVALID_ARGUMENTS = "invalid_arguments"
"""Key under which the model sees arguments that are not an object."""


def as_object(arguments: Any) -> dict[str, Any]:
    """Convert the arguments of a call to an object.

    Null and empty text give an empty object. All other arguments become the value of a single key,
    `INVALID_ARGUMENTS`.
    """
    found = arguments
    if isinstance(arguments, str):
        try:
            found = loose_json.parse(arguments) if arguments.strip() else None
        except Malformed:
            found = arguments
    if isinstance(found, Mapping):
        return dict(found)
    return {} if found is None else {INVALID_ARGUMENTS: arguments}


def alternative_chats(chat: Sequence[Mapping[str, Any]]) -> Iterator[Chat]:
    """Yield other forms of a chat that a template rejects. The most similar form comes first.

    Some templates support only one call per message. Others need ids of nine letters and digits, or arguments in the
    form of JSON text.

    Args:
        chat: Checked messages. The arguments of their calls are objects.
    """
    single = _one_call_each(chat)
    known = [list(map(dict, chat))]
    for form in (single, _with_ids(chat, _short), _with_ids(single, _short), _as_json(chat), _as_json(single)):
        if form not in known:
            known.append(form)
            yield form


def with_counted_ids(chat: Sequence[Mapping[str, Any]]) -> Chat:
    """Give calls ids in the form that Kimi K2 expects: functions.NAME:NUMBER."""
    count = iter(range(1 << 30))
    return _with_ids(chat, lambda call: f"functions.{call['function']['name']}:{next(count)}")


def _one_call_each(chat: Sequence[Mapping[str, Any]]) -> Chat:
    """Move each call to a separate message, which its result follows."""
    found: Chat = []
    waiting = list(map(dict, chat))
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        until = next((i for i, other in enumerate(waiting) if other["role"] != "tool"), len(waiting))
        results, waiting = waiting[:until], waiting[until:]
        for i, call in enumerate(calls):
            found.append({**(message if not i else {"role": message["role"], "content": ""}), "tool_calls": [call]})
            named = (one for one in results if call.get("id") and one.get("tool_call_id") == call["id"])
            result = next(named, None) or next((one for one in results if not one.get("tool_call_id")), None)
            if result is not None:
                results.remove(result)
                found.append(result)
        found += results
    return found


def _with_ids(chat: Sequence[Mapping[str, Any]], make: Callable[[Mapping[str, Any]], str]) -> Chat:
    """Replace the ids of calls, and the ids in their results."""
    found: Chat = []
    ids: dict[Any, str] = {}
    unnamed: list[str] = []  # ids of the latest calls, for results without an id, which come in the same order
    for message in chat:
        if calls := message.get("tool_calls"):
            changed = [{**call, "id": make(call)} for call in calls]
            ids |= {call.get("id"): other["id"] for call, other in zip(calls, changed, strict=True)}
            unnamed = [call["id"] for call in changed]
            found.append({**message, "tool_calls": changed})
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or (unnamed.pop(0) if unnamed else "")
            found.append({**message, "tool_call_id": ids.get(given, given)})
        else:
            found.append(dict(message))
    return found


def _short(call: Mapping[str, Any]) -> str:
    """Return an id of nine letters and digits for a call. It is the same each time the call is sent."""
    given = str(call.get("id") or call["function"]["name"])
    return given if re.fullmatch("[a-zA-Z0-9]{9}", given) else hashlib.blake2b(given.encode()).hexdigest()[:9]


def _as_json(chat: Sequence[Mapping[str, Any]]) -> Chat:
    """Convert arguments to JSON text."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": loose_json.dumps(function["arguments"])}}

    return [
        {**message, "tool_calls": [*map(changed, message["tool_calls"])]}
        if message.get("tool_calls")
        else dict(message)
        for message in chat
    ]
