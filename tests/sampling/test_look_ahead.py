"""Patterns with look-ahead, and equivalent patterns."""

from __future__ import annotations

import random
import re

import pytest

from paceline.sampling.look_ahead import _EQUIVALENTS, has_look_around, without_look_ahead

PATTERNS = {
    "pydantic's Decimal": (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "-+.012"),
    "pydantic's Decimal, 5 digits": (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)", None),
    "zod's email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        "ab.@-",
    ),
    "a password": (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}$", "aAB12"),
    "a length": (r"^(?=.{2,4}$)a+b*$", "ab"),
    "not a word": (r"^(?!ab$)[ab]+$", "ab"),
    "not a beginning": (r"^(?!ab)[ab]*$", "ab"),
    "not one letter": (r"^(?!a)[abc]*$", "abc"),
    "not a class": (r"^(?![ab])[abc]*$", "abc"),
    "not only": (r"^(?![ab]+$)[abc]*$", "abc"),
    "not within": (r"^(?!.*b)[abc]+$", "abc"),
    "not without": (r"^(?!.*[^ab])[abc]+$", "abc"),
    "not twice": (r"^(?!.*--)[a-]+$", "a-"),
    "not doubled": (r"^(?![\s\S]*\.\.)(?!\.)[ab.]+$", "ab."),
    "escaped": (r"^(?!\$)(?=.*\\)[a$\\]+$", "a$\\"),
    "a duration": (next(iter(_EQUIVALENTS)), "PT1WDYHMS."),
    "look-behind": (r"^a(?<!b)c$", None),
    "in the middle": (r"^a(?=b)b$", None),
    "in a branch": (r"^(?=a)b|c$", None),
    "a reference": (r"^(a|b)\1$", None),
    "a named reference": (r"^(?<x>a)\k<x>$", None),
    "anywhere": (r"(?!a)b", None),
    "a choice": (r"^(?!a|bc)[abc]+$", None),
    "not twice, of two": (r"^(?!.*ab)[ab]+$", None),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_has_equals_without_look_ahead(name: str) -> None:
    pattern, letters = PATTERNS[name]
    assert has_look_around(pattern)
    equal = without_look_ahead(pattern)
    if letters is None:
        assert equal is None
        return
    assert equal is not None
    rng, seen = random.Random(name), set()
    for _ in range(4000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(9)))
        if name == "zod's email":
            text += rng.choice(("", "@a.bb", "@b-.a.ab"))
        if name == "a duration" and rng.random() < 0.8:
            text = "P" + "".join(
                rng.choice(("1Y", "2M", "1D", "T", "1H", "1M", "1.5S", "W", "1W")) for _ in range(rng.randrange(5))
            )
        expected = bool(re.search(pattern, text))
        assert all(re.search(other, text) for other in equal) is expected, text
        seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize("pattern", [r"^\d+$", r"(?:a)(?<name>b)", r"\\1", r"[(]?=", r"\(?=", ""])
def test_most_patterns_have_none(pattern: str) -> None:
    assert not has_look_around(pattern)


@pytest.mark.parametrize(
    "pattern", ["^" + "(?=" * 20_000, "^(?!" + "a" * 50_000 + ")", "^" + "(?=a)" * 9_000, "\\" * 90_001]
)
def test_long_patterns_take_no_time(pattern: str) -> None:
    without_look_ahead(pattern) if has_look_around(pattern) else None
