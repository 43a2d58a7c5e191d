"""Function calls in a reply, read as it is written. Whatever is not a call in the family's form stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.tools import FENCED, MISTRAL, CallFormat


@dataclass(frozen=True, slots=True)
class Call:
    """A function call in a reply. `arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Piece = Call | str
"""A call, or more arguments of the call before it."""


def _kept(text: str, sign: str) -> int:
    """How much of the text's end may be the beginning of `sign`, or all of it."""
    return next((n for n in range(min(len(text), len(sign)), 0, -1) if text.endswith(sign[:n])), 0)


class ForcedReader:
    """Reads a reply that is one call written by `CallFormat.grammar`, and shows its arguments as they come."""

    def __init__(self, family: CallFormat, names: Collection[str]) -> None:
        self._family, self._names = family, list(names)
        self._held, self._arguments = "", ""
        self._called: str | None = None
        self._inside = False
        self.complete = False
        """Whether the call was whole at the end of the reply."""

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """(text to show, which there is none of, and what came of the call)."""
        self._held += text
        return "", [*self._begun(), *self._more()]

    def _begun(self) -> Iterator[Piece]:
        """The call, once it is known which function it calls; with one function that is known at once."""
        if self._called is not None or not self._held:
            return
        held = self._held.lstrip()
        heads = {name: self._family.head(name) for name in self._names}
        fitting = [name for name, head in heads.items() if head.startswith(held) or held.startswith(head)]
        if len(fitting) == 1:
            self._called = fitting[0]
            yield Call(self._called, "", self._family.new_id())

    def _more(self) -> Iterator[Piece]:
        """Arguments, without what may be the call's end."""
        if self._called is None:
            return
        if not self._inside:
            held, head = self._held.lstrip(), self._family.head(self._called)
            if not held.startswith(head):
                return
            self._held, self._inside = held[len(head) :], True
        cut = len(self._held) - _kept(self._held, self._family.tail)
        yield from self._show(self._held[:cut])
        self._held = self._held[cut:]

    def _show(self, text: str) -> Iterator[Piece]:
        self._arguments += text
        if text:
            yield text

    def flush(self) -> tuple[str, list[Piece]]:
        """The rest of arguments that were cut off; what follows complete ones is the call's end."""
        self.complete = _is_json(self._arguments)
        return "", [] if self.complete or not self._inside else list(self._show(self._held))


class CallReader:
    """Splits a reply, as it comes, into text and calls.

    White space around calls is theirs, and is not shown. `names`: the functions there are; a call of another is text.
    `single`: what comes after the first call is dropped.
    """

    def __init__(self, family: CallFormat, names: Collection[str], single: bool = False) -> None:
        self._family, self._names, self._single = family, frozenset(names), single
        self._forms = (family, FENCED)
        self._held = ""
        self._inside: CallFormat | None = None
        """The form of the call that `_held` is in."""
        self._began = False
        self._space = ""
        self.called = False

    def push(self, text: str) -> tuple[str, Sequence[Piece]]:
        """(text to show, calls that are complete)."""
        self._held += text
        shown, calls = "", []
        for piece in self._pieces():
            if isinstance(piece, str):
                shown += self._show(piece)
            else:
                calls += piece if not self._single else piece[: not self.called]
                self.called, self._space = True, ""
        return shown, calls

    def flush(self) -> tuple[str, Sequence[Piece]]:
        """What the end of the reply leaves: a call without its end, or text that was held back."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", None
        found = self._parse(held, inside) if inside else None
        if found is None:
            rest = self._show((self._opener(held, inside) if inside else "") + held)
            space = "" if self.called else self._space
            return rest + space, []
        found = found[: not self.called] if self._single else found
        self.called = self.called or bool(found)
        return "", found

    def _show(self, text: str) -> str:
        """White space waits until it is known whether text follows it or a call."""
        if self.called and self._single:
            return ""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped

    def _pieces(self) -> Iterator[str | list[Call]]:
        while self._held:
            step = self._within(self._inside) if self._inside else self._outside()
            if step is None:
                return
            yield step

    def _outside(self) -> str | None:
        """Text up to where a call begins; None where that cannot be told yet."""
        family, held = self._family, self._held
        if family.bare and not self._began:
            start = held.lstrip()
            if not start:
                return None
            self._began = True
            if start.startswith("{"):
                self._held, self._inside = start, family
                return ""
        found = [(at, form) for form in self._forms if (at := held.find(form.opens)) >= 0]
        if found:
            at, form = min(found, key=lambda one: one[0])
            self._held, self._inside, self._began = held[at + len(form.opens) :], form, True
            return held[:at]
        shown = len(held) - max(_kept(held, form.opens) for form in self._forms)
        self._held = held[shown:]
        return held[:shown] or None

    def _within(self, form: CallFormat) -> str | list[Call] | None:
        """The call, once it is whole."""
        if not form.closes:
            return None
        if self._held.lstrip()[:1] not in ("", "{", "["):  # a block of code in another form is not held back
            self._inside = None
            return form.opens
        inner, found, after = self._held.partition(form.closes)
        if not found:
            return None
        self._held, self._inside = after, None
        calls = self._parse(inner, form)
        return f"{form.opens}{inner}{form.closes}" if calls is None else calls

    @staticmethod
    def _opener(held: str, form: CallFormat) -> str:
        return "" if form.bare and held.startswith("{") else form.opens

    def _parse(self, text: str, form: CallFormat) -> list[Call] | None:
        """The calls, or None for what is none."""
        found = _PARSERS[form.name](text.strip(), form.key)
        if not found or any(name not in self._names for name, _ in found):
            return None
        return [Call(name, json.dumps(given, ensure_ascii=False), self._family.new_id()) for name, given in found]


Found = list[tuple[str, dict[str, Any]]]


def _hermes(text: str, key: str) -> Found:
    """One object, or a list of them (SmolLM2)."""
    return _objects(_json(text), key)


def _llama(text: str, key: str) -> Found:
    """Objects, ";" between them."""
    found: Found = []
    while text:
        value, text = _first(text)
        one = _objects(value, key) or _objects(value, "arguments")
        if len(one) != 1:
            return []
        found += one
        text = text.lstrip().removeprefix(";").lstrip()
    return found


def _mistral(text: str, key: str) -> Found:
    """A list of objects; or a name and an object, with [TOOL_CALLS] between two."""
    if text.startswith("["):
        return _objects(_json(text), key)
    found: Found = []
    for part in filter(None, text.split(MISTRAL.opens)):
        hit = re.fullmatch(
            r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL
        )
        given = _json(hit[2]) if hit else None
        if not hit or not isinstance(given, dict):
            return []
        found.append((hit[1], given))
    return found


def _fenced(text: str, key: str) -> Found:
    """As Hermes'; at the end of a reply the fence may stand on the same line."""
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _first(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and the rest."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, ""
    return value, text[end:]
