"""Where prompts come from: the command line, stdin, or a file with one JSON object per line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidPrompt

STDIN = "-"
_FORMS = ("prompt", "turns", "messages")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: text or chat messages. `id`: None where only one prompt was given."""

    id: str | int | None
    prompt: str | list[dict[str, Any]]


def single_prompt(prompt: str | None) -> str:
    """The prompt of the command line, else all of stdin. Raises `InvalidPrompt`."""
    if prompt is None or prompt == STDIN:
        prompt = _from_stdin(asked=prompt == STDIN)
    try:
        return _text(prompt, "the prompt")
    except ValueError as error:
        raise InvalidPrompt(str(error), "Give it as an argument, on stdin, or with --prompts FILE") from None


def _from_stdin(asked: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise InvalidPrompt("there is no prompt", "Give it as an argument, on stdin, or with --prompts FILE")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"stdin is not UTF-8 text (byte {error.start})", "Convert it to UTF-8") from None
    # The newline that ends a file or an echo is not part of the question.
    return text.removesuffix("\n").removesuffix("\r")


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL file ("-": stdin), checked. Raises `InvalidPrompt` naming file and line, or `OSError`."""
    from_stdin = str(path) == STDIN
    name = "stdin" if from_stdin else str(path)
    data = sys.stdin.buffer.read() if from_stdin else path.read_bytes()
    rows: dict[str | int | None, tuple[int, Row]] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = _row(line, number)
            if row.id in rows:
                raise ValueError(f"the id {row.id!r} was used on line {rows[row.id][0]} already")
        except ValueError as error:
            raise InvalidPrompt(f"{name}, line {number}: {error}") from None
        rows[row.id] = (number, row)
    if not rows:
        raise InvalidPrompt(f"{name} holds no prompts", 'Write one JSON object per line, such as {"prompt": "Hi"}')
    return [row for _, row in rows.values()]


def _row(line: bytes, number: int) -> Row:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not usable JSON (nested too deeply)") from None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object; write {"prompt": ...}')
    return Row(_id(row.get("id"), number), _prompt(row))


def _id(value: object, number: int) -> str | int:
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"the id is {json.dumps(value)}; it must be a string or a whole number")
    return value


def _prompt(row: dict[str, Any]) -> str | list[dict[str, Any]]:
    given = [form for form in _FORMS if row.get(form) is not None]
    if not given:
        raise ValueError('the row has no prompt; give it "prompt", "turns" or "messages"')
    if len(given) > 1:
        raise ValueError(f"the row has {' and '.join(map(repr, given))}; give it only one of them")
    value = row[given[0]]
    if given[0] == "messages":
        return _messages(value)
    if given[0] == "prompt":
        return _text(value, "'prompt'")
    if not isinstance(value, list) or not value:
        raise ValueError("'turns' is not a list of at least one text")
    return _text(value[0], "the first of 'turns'")


def _text(value: object, what: str) -> str:
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
        _text(message["role"], f"the role of message {number}")
        if message["content"] != "":
            _text(message["content"], f"the content of message {number}")
    if not any(message["content"] for message in value):
        raise ValueError("all messages are empty")
    return value
