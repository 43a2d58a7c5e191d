"""Tools for reading text while it is still being written.

A reader is a generator. It yields when it needs more text, and returns its result at the end. Each character is read
once, so a reader takes linear time, however the text arrives.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import AnyStr, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """The text does not have the form that its reader expects."""


def overlap(text: AnyStr, marker: AnyStr) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`."""
    return next((n for n in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:n])), 0)


class GrowingText:
    """Text that is read from the front.

    Attributes:
        is_complete: True once the text is complete. Readers then do not wait for more.
    """

    def __init__(self, text: str = "", is_complete: bool = False) -> None:
        self.is_complete = is_complete
        self._held, self._at = text, 0
        self._from = 0
        """The index in `_held` at which the text that `taken` returns begins."""
        self._past: list[str] = []

    def push(self, text: str) -> None:
        """Add text. Text that has already been read is not copied again."""
        self._past.append(self._held[self._from : self._at])
        self._held = self._held[self._at :] + text
        self._at = self._from = 0

    def taken(self) -> str:
        """Return the text that has been read since the last call."""
        found = "".join(self._past) + self._held[self._from : self._at]
        self._past, self._from = [], self._at
        return found

    def ahead(self, count: int = 1) -> Reading[str]:
        """Return the next characters without reading them. There are fewer only at the end of the text."""
        while len(self._held) - self._at < count and not self.is_complete:
            yield
        return self._held[self._at : self._at + count]

    def begins(self, *texts: str) -> Reading[str]:
        """Return the longest of these texts that comes next, without reading it. Return "" if none comes next."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._held[self._at : self._at + longest]
            if self.is_complete or not any(len(text) > len(rest) and text.startswith(rest) for text in texts):
                return max((text for text in texts if rest.startswith(text)), key=len, default="")
            yield

    def skip(self, *texts: str) -> Reading[str]:
        """Read and return the longest of these texts that comes next. If none does, return ""."""
        found = yield from self.begins(*texts)
        self._at += len(found)
        return found

    def take(self) -> Reading[str]:
        """Read one character. Raise `Malformed` at the end of the text."""
        found = yield from self.ahead()
        if not found:
            raise Malformed
        self._at += 1
        return found

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read all characters that match a pattern. The pattern must be a repeated character class, `[...]*`."""
        parts = []
        while True:
            found = pattern.match(self._held, self._at)
            assert found is not None
            parts.append(found[0])
            self._at = found.end()
            if self.is_complete or self._at < len(self._held):
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        """Read and return white space."""
        return (yield from self.run(_SPACE))

    def until(self, marker: str) -> Reading[str]:
        """Read everything up to a marker, and the marker itself. Return the text before the marker.

        Raises:
            Malformed: If the text ends without the marker.
        """
        parts = []
        while (at := self._held.find(marker, self._at)) < 0:
            if self.is_complete:
                raise Malformed
            at = max(self._at, len(self._held) - len(marker) + 1)
            parts.append(self._held[self._at : at])
            self._at = at
            yield
        parts.append(self._held[self._at : at])
        self._at = at + len(marker)
        return "".join(parts)

    def seek(self, markers: Sequence[str], pattern: re.Pattern[str]) -> str:
        """Read everything up to the first of these markers, and the marker itself. Return the marker.

        If there is no marker yet, read everything that cannot be part of a marker, and return "".

        Args:
            markers: The markers.
            pattern: Pattern that matches any of them.
        """
        if found := pattern.search(self._held, self._at):
            self._at = found.start()
            return found[0]
        tail = self._held[max(self._at, len(self._held) - max(map(len, markers), default=0)) :]
        self._at = len(self._held) - (
            0 if self.is_complete else max((overlap(tail, one) for one in markers), default=0)
        )
        return ""


def result_of(reading: Reading[T]) -> T:
    """Return the result of a reader of a complete text."""
    try:
        next(reading)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("a reader waits although its text is complete")
