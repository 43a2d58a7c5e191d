"""A one-pass reader for JSON as language models write it.

It accepts JSON and these deviations: raw line breaks and tabs in strings, unknown escapes, single quotes, names without
quotes, Python's `True`, `False`, `None` and tuples, a comma before a closing bracket, and missing brackets at the end.
Everything else is `Malformed`, because the meaning must be unambiguous.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from math import isfinite
from typing import Any

from paceline.text.growing import GrowingText, Malformed, Reading, result_of

MAX_DEPTH = 100
"""Maximum nesting depth of lists and objects."""

_QUOTES = ('"', "'")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in _QUOTES}
_WORD = re.compile(r"[\w.$+-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"', "'": "'"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parse(text: str) -> Any:
    """Parse a complete text. Raise `Malformed` if it is not a single value."""
    growing = GrowingText(text, is_complete=True)
    reader = JsonReader(growing)
    result_of(growing.space())
    value = result_of(reader.value())
    result_of(growing.space())
    rest = result_of(growing.ahead())
    if reader.unclosed or rest:
        raise Malformed
    return value


def dumps(value: Any) -> str:
    """Write a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


class JsonReader:
    """Reads values from a growing text.

    Attributes:
        unclosed: The lists and objects of the value read most recently that were still open at the end of the text,
            outermost first. Empty if an end marker ended the value, because it closes all of them.
    """

    def __init__(self, text: GrowingText, quote: str = "", ends: Sequence[str] = ()) -> None:
        """Create a reader.

        Args:
            text: The text. Other readers may read it as well.
            quote: An additional quotation mark. Strings between two such marks have no escapes.
            ends: Markers that end a value even if brackets are missing.
        """
        self._text, self._ends = text, tuple(filter(None, ends))
        self._quotes = (quote, *_QUOTES) if quote else _QUOTES
        self.unclosed: list[Any] = []

    def value(self, keys: Collection[str] | None = None) -> Reading[Any]:
        """Read one value.

        Args:
            keys: Allowed keys if the value is an object. None allows all.

        Raises:
            Malformed: If the text is not a value.
        """
        text, open_containers = self._text, list[tuple[Any, str]]()
        self.unclosed = []
        found = yield from self._begin(open_containers)
        fresh = True  # a member may follow: this is after an opening bracket or a comma
        while open_containers:
            inner, closer = open_containers[-1]
            yield from text.space()
            if (yield from text.skip(closer)):
                open_containers.pop()
                fresh = False
            elif fresh:
                fresh = yield from self._member(inner, open_containers, keys if len(open_containers) == 1 else None)
            elif (yield from text.skip(",")):
                fresh = True
            elif not (yield from text.ahead()):
                self.unclosed = [one for one, _ in open_containers]
                break
            elif (yield from text.begins(*self._ends)):
                break
            else:
                raise Malformed
        return found

    def arguments(self) -> Reading[dict[str, Any]]:
        """Read the named arguments of a Python call after its opening parenthesis. Raise `Malformed` for anything
        else."""
        text, found = self._text, dict[str, Any]()
        while True:
            yield from text.space()
            if (yield from text.skip(")")):
                return found
            name = yield from text.run(_WORD)
            yield from text.space()
            if not name or not (yield from text.skip("=")):
                raise Malformed
            yield from text.space()
            found[name] = yield from self.value()
            yield from text.space()
            if not (yield from text.skip(",")) and not (yield from text.begins(")")):
                raise Malformed

    def _member(
        self, inner: Any, open_containers: list[tuple[Any, str]], keys: Collection[str] | None
    ) -> Reading[bool]:
        """Read a member of the innermost list or object.

        If its value is a list or an object, read only the opening bracket, and return True.
        """
        depth = len(open_containers)
        if isinstance(inner, list):
            inner.append((yield from self._begin(open_containers)))
        else:
            key = yield from self._key()
            if keys is not None and key not in keys:
                raise Malformed
            yield from self._text.space()
            if not (yield from self._text.skip(":")):
                raise Malformed
            yield from self._text.space()
            inner[key] = yield from self._begin(open_containers)
        return len(open_containers) > depth

    def _begin(self, open_containers: list[tuple[Any, str]]) -> Reading[Any]:
        """Read a string, a number, a word, or the opening bracket of a list or object, which is then added to
        `open_containers`."""
        if bracket := (yield from self._text.skip(*_CLOSERS)):
            inner: Any = {} if bracket == "{" else []
            open_containers.append((inner, _CLOSERS[bracket]))
            if len(open_containers) > MAX_DEPTH:
                raise Malformed
            return inner
        if quote := (yield from self._text.skip(*self._quotes)):
            return (yield from self._string(quote))
        return _word((yield from self._text.run(_WORD)))

    def _key(self) -> Reading[str]:
        if quote := (yield from self._text.skip(*self._quotes)):
            return (yield from self._string(quote))
        if not (name := (yield from self._text.run(_WORD))):
            raise Malformed
        return name

    def _string(self, quote: str) -> Reading[str]:
        """Read a string after its opening quotation mark."""
        text, parts = self._text, list[str]()
        if quote not in _QUOTES:
            return (yield from text.until(quote))
        while True:
            parts.append((yield from text.run(_PLAIN[quote])))
            if (yield from text.skip("\\")):
                parts.append((yield from self._escape()))
            elif not (yield from text.skip(quote)):
                raise Malformed
            elif quote == "'" and parts[-1][-1:].isalnum() and (yield from text.ahead()).isalnum():
                parts.append(quote)  # an apostrophe
            else:
                return _without_halves("".join(parts))

    def _escape(self) -> Reading[str]:
        """Read an escape sequence after its backslash. Unknown sequences are kept literally, as in "C:\\dir"."""
        if (yield from self._text.begins("u")):
            digits = (yield from self._text.ahead(5))[1:]
            if _HEX.fullmatch(digits):
                yield from self._text.skip("u" + digits)
                return chr(int(digits, 16))
        mark = yield from self._text.take()
        return _ESCAPES.get(mark, "\\" + mark)


def _word(word: str) -> Any:
    """Return the value of a number or of a word such as `true`. Raise `Malformed` for other words."""
    if word in _WORDS:
        return _WORDS[word]
    number = _NUMBER.fullmatch(word)
    if not number or len(word) > 1000:
        raise Malformed
    found = float(word) if number[2] or number[3] else int(word)
    if not isfinite(found if isinstance(found, float) else 0.0):
        raise Malformed
    return found


def _without_halves(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates with U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
