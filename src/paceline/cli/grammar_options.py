"""The form of a reply, as the command line has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from paceline.sampling.grammar import Grammar


def parse_grammar(json_schema: str | None = None, regex: str | None = None, grammar: str | None = None) -> Grammar:
    """What --json-schema, --regex or --grammar says. Raises `InvalidOption`."""
    from paceline.sampling.grammar import Grammar

    given = [text for text in (json_schema, regex, grammar) if text is not None]
    if len(given) != 1:
        raise InvalidOption("a reply has one form", "Give one of --json-schema, --regex and --grammar")
    if json_schema is not None:
        return Grammar.json_schema(_read("--json-schema", json_schema, "{"))
    return Grammar.regex(given[0]) if grammar is None else Grammar.lark(_read("--grammar", grammar, ":"))


def _read(option: str, text: str, mark: str) -> str:
    """The text of a file, or the text itself, in which `mark` stands."""
    try:
        if len(text) < 4096 and "\n" not in text and Path(text).is_file():
            return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidOption(f"{option} {text!r} cannot be read: {error}", "Give a UTF-8 file, or the text") from error
    if mark not in text:
        raise InvalidOption(f"{option} {text!r} is neither a file nor a text of that kind", "Give one of them")
    return text
