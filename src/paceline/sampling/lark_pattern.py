"""Converts Lark grammars to regular expressions. Only regular grammars can be converted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_IMPORTED = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "HEXDIGIT": "[0-9A-Fa-f]",
}
"""Terminals of Lark's `common` module, as regular expressions."""
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<regex>/(?:[^/\\\n]|\\.)+/)|(?P<name>[A-Za-z_]\w*)'
    r"|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<other>[()|?*+\[\]]))"
)
_MAX_LENGTH = 20_000
"""Maximum length of a pattern, in characters."""


class _NotRegular(Exception):
    """The grammar has a rule that refers to itself, or a construct that this module does not support."""


def pattern_of(grammar: str) -> str | None:
    """Return the regular expression that matches the texts of a Lark grammar, or None if there is none."""
    try:
        return _Pattern(_rules(grammar)).of("start", ())
    except (_NotRegular, ValueError, RecursionError):
        return None


def _rules(grammar: str) -> dict[str, str]:
    """Return the rules of a grammar: name of a rule -> its right side."""
    rules: dict[str, str] = {}
    name = ""
    for line in grammar.splitlines():
        line = re.sub(r'("(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)+/)|//.*|^\s*#.*', lambda found: found[1] or "", line)
        imported = re.fullmatch(r"\s*%import\s+common\.(\w+)\s*", line)
        if imported and imported[1] in _IMPORTED:
            rules[imported[1]] = f"/{_IMPORTED[imported[1]]}/"
        elif line.lstrip().startswith("%"):
            raise _NotRegular
        elif begun := re.match(r"\s*[?!]?([A-Za-z_]\w*)(?:\.\d+)?\s*:(.*)", line):
            name, rules[begun[1]] = begun[1], begun[2]
        elif line.strip():
            if name not in rules:
                raise _NotRegular
            rules[name] += "\n" + line
    # An alternative's name does not affect its text.
    return {name: re.sub(r"->\s*\w+", "", right) for name, right in rules.items()}


class _Pattern:
    """Converts rules to regular expressions."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules

    def of(self, name: str, above: tuple[str, ...]) -> str:
        """Return the regular expression of a rule.

        Args:
            name: The rule.
            above: The rules that are being converted and that led to this rule, outermost first.
        """
        if name not in self._rules or name in above:
            raise _NotRegular
        right, at, found = self._rules[name].rstrip(), 0, ""
        while at < len(right):
            token = _TOKEN.match(right, at)
            if token is None or len(found) > _MAX_LENGTH:
                raise _NotRegular
            at, found = token.end(), found + self._token(token, (*above, name))
        return f"(?:{found})"

    def _token(self, token: re.Match[str], above: tuple[str, ...]) -> str:
        match token.lastgroup:
            case "text":
                return "(?:" + re.escape(str(json.loads(token["text"]))) + ")"
            case "regex":
                return "(?:" + str(token["regex"])[1:-1].replace(r"\/", "/") + ")"
            case "name":
                return self.of(token["name"], above)
            case "count":
                low, _, high = token["count"].strip("~ ").partition("..")
                return f"{{{int(low)},{int(high)}}}" if high else f"{{{int(low)}}}"
        other = str(token["other"])
        return {"(": "(?:", "[": "(?:", "]": ")?"}.get(other, other)
