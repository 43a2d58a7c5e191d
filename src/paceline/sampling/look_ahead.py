"""Rewrites a pattern with look-ahead as several patterns without it, because llguidance does not support look-ahead.

A text that matches `^(?=A)B` matches both `^A` and `^B`. For `^(?!A)B`, the complement of `^A` is needed. This module
knows the complement only for the forms of A that validators use: a character class up to the end, a forbidden
beginning, and a forbidden substring.
"""

from __future__ import annotations

import re

_LOOK_AROUND = re.compile(r"(?:\\[^1-9k]|[^\\])*?(?:\(\?<?[=!]|\\[1-9k])", re.DOTALL)
_ATOM = r"(?:\[\^?(?:\\.|[^\]\\])+\]|\\[^\dbBkpPux]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|[^\\.^$*+?()\[\]{}|])"
_ONLY_CLASS = re.compile(rf"\^?({_ATOM})([*+])\$")
_ATOMS = re.compile(rf"({_ATOM}+)(\$?)")
_OCCURS = re.compile(rf"(?:\.|\[\\s\\S\])\*({_ATOM}+)")

_MAX_LENGTH = 1000
"""Maximum length of a pattern to rewrite, in characters."""
_EQUIVALENTS = {
    # ISO 8601 durations of zod 4
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T(?:T_))?|T(?:T_))$".replace(
            "T_", r"\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S"
        )
    ),
}
"""Patterns with look-ahead in the middle -> equivalent patterns without it."""


def has_look_around(pattern: str) -> bool:
    """Return True if a pattern has look-around or back-references."""
    return bool(_LOOK_AROUND.match(pattern))


def without_look_ahead(pattern: str) -> list[str] | None:
    """Rewrite a pattern such that it needs no look-ahead.

    Returns:
        Patterns such that a text matches all of them if and only if it matches `pattern`. None if the pattern cannot be
        rewritten.
    """
    if pattern in _EQUIVALENTS:
        return [_EQUIVALENTS[pattern]]
    if not pattern.startswith("^") or len(pattern) > _MAX_LENGTH:
        return None
    found, rest = [], pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        end = _closing(rest)
        body = rest[3:end]
        made = f"^(?:{body.removeprefix('^')})" if rest[2] == "=" else _complement(body)
        if made is None or (rest[2] == "=" and "|^" in body):
            return None
        found.append(made)
        rest = rest[end + 1 :]
    found = [f"^{rest}", *found]
    outer_choice = "|" in _outside_groups(rest)  # the look-ahead applies only to the first branch
    return None if outer_choice or any(map(has_look_around, found)) else found


def _complement(body: str) -> str | None:
    """Return a pattern that matches the texts that do not begin with a match of `body`, or None if no such pattern is
    known."""
    if hit := _ONLY_CLASS.fullmatch(body):
        other = _negated_class(hit[1])
        return other if hit[2] == "*" else f"^$|{other}"
    body = body.removeprefix("^")
    if hit := _ATOMS.fullmatch(body):
        return f"^(?:{_not_beginning_with(re.findall(_ATOM, hit[1]), bool(hit[2]))})"
    if hit := _OCCURS.fullmatch(body):
        atoms = re.findall(_ATOM, hit[1])
        if len(atoms) == 1:
            return f"^{_negated_class(atoms[0])}*$"
        if len(atoms) == 2 and atoms[0] == atoms[1]:
            return f"^(?:{atoms[0]}?{_negated_class(atoms[0])})*{atoms[0]}?$"
    return None


def _not_beginning_with(atoms: list[str], whole: bool) -> str:
    """Return a pattern that matches the texts that do not begin with these atoms or, if `whole` is True, are not equal
    to them."""
    rest = r"[\s\S]" if whole else None
    for atom in reversed(atoms):
        after = "" if rest is None else f"|{atom}(?:{rest})"
        rest = f"$|{_negated_class(atom)}{after}"
    return rest or "$"


def _negated_class(atom: str) -> str:
    """Return a character class that contains all characters that an atom does not match."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    inner = atom[1:-1] if atom.startswith("[") else re.escape(atom) if len(atom) == 1 else atom
    return f"[^{inner}]"


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the group at the beginning of `text`, or the end of `text`."""
    depth = 0
    for hit in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", text, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(hit[0], 0)
        if not depth:
            return hit.start()
    return len(text)


def _outside_groups(text: str) -> str:
    """Return the parts of a pattern that are outside all groups and classes."""
    depth, found = 0, []
    for hit in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", text, re.DOTALL):
        depth -= hit[0] == ")"
        if not depth and len(hit[0]) == 1:
            found.append(hit[0])
        depth += hit[0] == "("
    return "".join(found)
