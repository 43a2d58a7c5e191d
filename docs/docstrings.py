"""Docstrings for the site: a paragraph of `name: meaning` lines becomes a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_PARAMETER = re.compile(r"^(\w+(?:, \w+)*): (?=\S)", re.MULTILINE)


class ParameterLists(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """Return the docstring with a list item for each line that begins with `name: `. Keep section headers."""
    first, *others = text.split("\n\n")
    paragraphs = [first, *map(_as_list, others)]
    return "\n\n".join(paragraphs)


def _as_list(paragraph: str) -> str:
    begin = _PARAMETER.search(paragraph)
    if begin is None or paragraph.startswith((" ", "- ", "|")):
        return paragraph
    items = _PARAMETER.sub(lambda name: f"- **{name[1]}**: ", paragraph[begin.start() :]).split("\n")
    return (
        paragraph[: begin.start()]
        + ("\n" if begin.start() else "")
        + "\n".join(item if item.startswith("- ") else f"  {item}" for item in items)
    )
