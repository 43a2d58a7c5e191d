"""Parsers of function calls in a reply as it grows. Whatever is not a call in the family's format stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.thinking import overlap
from paceline.server.tools import FENCED, MISTRAL, CallFormat


@dataclass(frozen=True, slots=True)
class Call:
    """A function call. `arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = Call | str
"""A new call, or more arguments of the last one."""


class ForcedCallParser:
    """Parses a reply that is one call generated under `CallFormat.grammar`; its arguments are passed on as they come.

    `complete`: whether the call was complete at the end of the reply.
    """

    def __init__(self, family: CallFormat, names: Collection[str]) -> None:
        self._family = family
        self._heads = {name: family.head(name) for name in names}
        self._held = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self.complete = False

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Return (text to show, always empty, and the new pieces of the call)."""
        pieces: list[Piece] = []
        self._held += text
        head = self._held.lstrip()
        if self._name is None and self._held:
            fitting = [name for name, known in self._heads.items() if known.startswith(head) or head.startswith(known)]
            if len(fitting) == 1:  # at once if there is only one function
                self._name = fitting[0]
                pieces.append(Call(self._name, "", self._family.new_id()))
        if self._name is not None and self._arguments is None and head.startswith(self._heads[self._name]):
            self._held, self._arguments = head.removeprefix(self._heads[self._name]), ""
        if self._arguments is not None:  # shown without what may be the end of the call
            pieces += self._show(len(self._held) - overlap(self._held, self._family.tail))
        return "", pieces

    def _show(self, length: int) -> list[str]:
        """Return the held text of this length, in a list, if there is any."""
        shown, self._held = self._held[:length], self._held[length:]
        self._arguments = (self._arguments or "") + shown
        return [shown] if shown else []

    def flush(self) -> tuple[str, list[Piece]]:
        """Return the rest of incomplete arguments; after complete ones the rest is the end of the call."""
        self.complete = self._arguments is not None and _json(self._arguments, _INVALID) is not _INVALID
        if self.complete or self._arguments is None:
            return "", []
        return "", [*self._show(len(self._held))]


class CallParser:
    """Splits a growing reply into text and calls.

    White space around calls is dropped. `names`: the known functions; a call of any other is text. `single`: everything
    after the first call is dropped.
    """

    def __init__(self, family: CallFormat, names: Collection[str], single: bool = False) -> None:
        self._family, self._names, self._single = family, frozenset(names), single
        self._formats = (family, FENCED)
        self._buffer = ""
        self._inside: CallFormat | None = None
        """Format of the call that `_buffer` is in."""
        self._text_began = False
        self._space = ""
        """White space that is shown if text follows it."""
        self.called = False

    def push(self, text: str) -> tuple[str, Sequence[Piece]]:
        """Return (text to show, complete calls)."""
        self._buffer += text
        shown, calls = "", []
        for piece in self._pieces():
            if isinstance(piece, str):
                shown += self._show(piece)
            else:
                calls += self._limited(piece)
                self._space = ""
        return shown, calls

    def flush(self) -> tuple[str, Sequence[Piece]]:
        """Return what the end of the reply leaves: a call without its end marker, or text that was held back."""
        held, inside = self._buffer, self._inside
        self._buffer, self._inside = "", None
        calls = self._parse(held, inside) if inside else None
        if calls is not None:
            return "", self._limited(calls)
        marked = inside is not None and not (inside.bare and held.startswith("{"))
        rest = self._show((inside.start if inside and marked else "") + held)
        return rest + ("" if self.called else self._space), []

    def _limited(self, calls: list[Call]) -> list[Call]:
        calls = calls[: not self.called] if self._single else calls
        self.called = self.called or bool(calls)
        return calls

    def _show(self, text: str) -> str:
        """Return text that can be shown; white space waits until text or a call follows it."""
        if self.called and self._single:
            return ""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped

    def _pieces(self) -> Iterator[str | list[Call]]:
        while self._buffer:
            piece = self._in_call(self._inside) if self._inside else self._in_text()
            if piece is None:
                return
            yield piece

    def _in_text(self) -> str | None:
        """Return text up to the beginning of a call; None if more of the reply is needed to tell."""
        family, held = self._family, self._buffer
        if family.bare and not self._text_began:
            held = held.lstrip()
            if not held:
                return None
            self._text_began = True
            if held.startswith("{"):
                self._buffer, self._inside = held, family
                return ""
            held = self._buffer
        starts = [(at, form) for form in self._formats if (at := held.find(form.start)) >= 0]
        if starts:
            at, form = min(starts, key=lambda start: start[0])
            self._buffer, self._inside, self._text_began = held[at + len(form.start) :], form, True
            return held[:at]
        shown = len(held) - max(overlap(held, form.start) for form in self._formats)
        self._buffer = held[shown:]
        return held[:shown] or None

    def _in_call(self, form: CallFormat) -> str | list[Call] | None:
        """Return the calls, or text if they are none; None if more of the reply is needed."""
        if not form.end:
            return None
        if self._buffer.lstrip()[:1] not in ("", "{", "["):  # a code block in another language is not held back
            self._inside = None
            return form.start
        inner, found, after = self._buffer.partition(form.end)
        if not found:
            return None
        self._buffer, self._inside = after, None
        calls = self._parse(inner, form)
        return f"{form.start}{inner}{form.end}" if calls is None else calls

    def _parse(self, text: str, form: CallFormat) -> list[Call] | None:
        found = _PARSERS[form.name](text.strip(), form.key)
        if not found or any(name not in self._names for name, _ in found):
            return None
        return [Call(name, json.dumps(given, ensure_ascii=False), self._family.new_id()) for name, given in found]


Found = list[tuple[str, dict[str, Any]]]
"""Names and arguments; empty if the text is not a call."""
_INVALID = object()


def _hermes(text: str, key: str) -> Found:
    """One object, or a list of them (SmolLM2)."""
    return _objects(_json(text), key)


def _llama(text: str, key: str) -> Found:
    """Objects separated by ";"."""
    found: Found = []
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        one = _objects(value, key) or _objects(value, "arguments")
        if len(one) != 1:
            return []
        found += one
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return found


def _mistral(text: str, key: str) -> Found:
    """A list of objects; or names with objects, separated by [TOOL_CALLS]."""
    if text.startswith("["):
        return _objects(_json(text), key)
    found: Found = []
    for part in filter(None, text.split(MISTRAL.start)):
        hit = re.fullmatch(
            r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL
        )
        given = _json(hit[2]) if hit else None
        if not hit or not isinstance(given, dict):
            return []
        found.append((hit[1], given))
    return found


def _fenced(text: str, key: str) -> Found:
    """As Hermes; at the end of a reply the fence may be on the same line."""
    return _hermes(text.removesuffix("```"), key)


_PARSERS: dict[str, Callable[[str, str], Found]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "fenced": _fenced,
}


def _objects(value: Any, key: str) -> Found:
    found: Found = []
    for one in value if isinstance(value, list) else [value]:
        given = one.get(key) if isinstance(one, dict) else None
        given = _json(given) if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(one.get("name"), str):
            return []
        found.append((one["name"], given))
    return found


def _json(text: str, default: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default
