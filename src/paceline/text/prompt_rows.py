"""Prompts in the rows of a JSONL file: {"prompt" | "turns" | "messages", "id"}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_FIELDS = ("prompt", "turns", "messages")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt (a text or chat messages) and its id. The id is None if there is only one prompt."""

    id: str | int | None
    prompt: str | list[dict[str, Any]]


def parse_row(line: bytes, number: int) -> PromptRow:
    """Parse the prompt on line `number`. The number is also the prompt's default id. If there are several turns, only
    the first is used.

    Raises:
        ValueError: If the line is not a prompt.
    """
    row = parse_object(line)
    return PromptRow(parse_id(row.get("id"), number), _prompt(row))


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse the JSON object on a line. Raise `ValueError`, with the reason, if the line is not a JSON object."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object, {"name": value, ...}')
    return row


def parse_id(value: object, number: int) -> str | int:
    """Return a row's id. If it has none, return its line number. Raise `ValueError` if the id is neither a string nor
    an integer."""
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"the id must be a string or a whole number, got {json.dumps(value)}")
    return value


def _prompt(row: dict[str, Any]) -> str | list[dict[str, Any]]:
    given = [field for field in _FIELDS if row.get(field) is not None]
    if not given:
        raise ValueError('the row has no prompt; add "prompt", "turns" or "messages"')
    if len(given) > 1:
        raise ValueError(f"the row has {' and '.join(map(repr, given))}; keep only one of them")
    value = row[given[0]]
    if given[0] == "messages":
        return _messages(value)
    if given[0] == "prompt":
        return text_of(value, "'prompt'")
    if not isinstance(value, list) or not value:
        raise ValueError("'turns' is not a list of at least one text")
    return text_of(value[0], "the first of 'turns'")


def text_of(value: object, what: str) -> str:
    """Return a value that must be non-empty, valid Unicode text. If it is not, raise `ValueError` with `what` as its
    name."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is not text")
    if not value:
        raise ValueError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not valid Unicode text (half of a surrogate pair)") from None
    return value


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' is not a list of at least one message")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f'message {number} is not an object with "role" and "content"')
        text_of(message["role"], f"the role of message {number}")
        if message["content"] != "":
            text_of(message["content"], f"the content of message {number}")
    if not any(message["content"] for message in value):
        raise ValueError("all messages are empty")
    return value
