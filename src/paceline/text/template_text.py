"""Text with a flag for each character: the chat template wrote it, or it is data.

A message can spell a model's control tokens, such as "<|im_start|>". But only control tokens that the template itself
wrote may become tokens. So each string that a template computes keeps one flag per character. Strings without flags are
data. The result of any operation that is not defined here is data, too. A mistake can therefore turn a marker of the
template into plain text, but never data into a marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

_RUN = re.compile(b"\1+")
_CONVERSION = re.compile(r"%(?:\((?P<key>\w+)\))?[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]|%%")


class TemplateText(str):
    """A string with one flag per character: 1 if the template wrote it, 0 if it is data."""

    _flags: bytes

    def __new__(cls, text: str = "", flags: bytes | None = None) -> TemplateText:
        """Create a text with one flag byte per character. Without flags, the whole text is data."""
        made = super().__new__(cls, text)
        made._flags = bytes(len(made)) if flags is None else flags
        return made

    @classmethod
    def written(cls, text: str) -> TemplateText:
        """Return a text whose characters all come from the template."""
        return cls(text, b"\1" * len(text))

    @classmethod
    def of_spans(cls, text: str, spans: Iterable[Sequence[int]]) -> TemplateText:
        """Return a text whose characters in `spans` (start, end) come from the template."""
        flags = bytearray(len(text))
        for start, end in spans:
            flags[start:end] = b"\1" * (end - start)
        return cls(text, bytes(flags))

    def spans(self) -> list[tuple[int, int]]:
        """Return the spans (start, end) that the template wrote."""
        return [run.span() for run in _RUN.finditer(self._flags)]

    def __str__(self) -> str:
        """Return the text with its flags. Use `plain` to drop them."""
        return self

    def plain(self) -> str:
        """Return the text without its flags."""
        return super().__str__()

    def __add__(self, other: str) -> TemplateText:
        return TemplateText(super().__add__(other), self._flags + flags_of(other))

    def __radd__(self, other: str) -> TemplateText:
        return TemplateText(other) + self

    def __mul__(self, count: SupportsIndex) -> TemplateText:
        return TemplateText(super().__mul__(count), self._flags * count)

    __rmul__ = __mul__

    def __mod__(self, value: Any) -> str:
        found: list[str] = []
        at, left = 0, list(value) if isinstance(value, tuple) else [value]
        for hit in _CONVERSION.finditer(self):
            found.append(self[at : hit.start()])
            at = hit.end()
            if hit[0] == "%%":
                found.append(self[at - 1 : at])
                continue
            given = value if hit["key"] else left.pop(0) if left else ()
            found.append(given if hit[0] == "%s" and isinstance(given, str) else hit[0] % given)
        made = concat([*found, self[at:]])
        return made if made == (plain := super().__mod__(value)) else plain

    def __getitem__(self, key: SupportsIndex | slice) -> TemplateText:
        text = super().__getitem__(key)
        if isinstance(key, slice):
            return TemplateText(text, self._flags[key])
        return TemplateText(text, bytes([self._flags[key]]))

    def __iter__(self) -> Iterator[TemplateText]:
        return (self[i] for i in range(len(self)))

    def lstrip(self, chars: str | None = None) -> TemplateText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TemplateText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> TemplateText:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> TemplateText:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends))

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, _ = super().partition(sep)
        return self._cut(len(before), len(found))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, _ = super().rpartition(sep)
        return self._cut(len(before), len(found))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        return joined(new, self.split(old, count)) if old else super().replace(old, new, count)

    def join(self, parts: Iterable[str]) -> TemplateText:
        return joined(self, parts)

    def upper(self) -> str:
        return self._mapped(super().upper())

    def lower(self) -> str:
        return self._mapped(super().lower())

    def capitalize(self) -> str:
        return self._mapped(super().capitalize())

    def title(self) -> str:
        return self._mapped(super().title())

    def _mapped(self, text: str) -> str:
        """Return a text that was mapped character by character, with this text's flags. If its length differs, it is
        data."""
        return TemplateText(text, self._flags) if len(text) == len(self) else text

    def _cut(self, size: int, found: int) -> tuple[str, str, str]:
        return self[:size], self[size : size + found], self[size + found :]

    def _located(self, parts: Sequence[str], sep: str | None = None) -> list[str]:
        """Return consecutive parts of this text with their flags."""
        found: list[str] = []
        at = 0
        for part in parts:
            start = self.find(part, at)
            found.append(self[start : start + len(part)])
            at = start + len(part) + len(sep or "")
        return found


def flags_of(text: str) -> bytes:
    """Return the flags of a string."""
    return text._flags if isinstance(text, TemplateText) else bytes(len(text))


def joined(separator: str, parts: Iterable[str]) -> TemplateText:
    """Join parts with a separator."""
    known = list(parts)
    text = str.join(separator, known)
    return TemplateText(text, flags_of(separator).join(map(flags_of, known)))


def concat(parts: Iterable[str]) -> TemplateText:
    """Concatenate parts."""
    return joined("", parts)
