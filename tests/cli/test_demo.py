"""`paceline demo`."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.demo import _first_difference, _report
from paceline.engine.results import Completion
from paceline.engine.stats import Stats
from tests.support.toy_cli import (
    Shop,
    run,
)


def test_demo_writes_twice_the_same_and_says_so(shop: Shop) -> None:
    result = run("demo", "abcabc", "-n", "12", "--temperature", "1")
    assert result.exit_code == 0, result.output
    text = result.stdout
    first, second = text.index("With speculation"), text.index("Without")
    assert text[first:second].split("\n", 1)[1].strip() == text[second : text.index("┏")].split("\n", 1)[1].strip()
    assert "texts identical: yes, all 12 tokens" in text
    for part in ("plain", "With speculation, by suffix", "decode", "speedup", "tokens/round", "acceptance"):
        assert part in text


def completion(exact: Any, ids: list[int]) -> Completion:
    stats = Stats(0, exact, rounds=1, tokens=len(ids))
    stats.seconds["verify"] = 1.0
    return Completion("", ids, "length", stats, 1)


def test_demo_says_where_texts_differ(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    _report(completion("rounding", [1, 2, 3]), completion("rounding", [1, 2, 4]))
    assert "texts identical: NO, they differ at token 2" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as caught:
        _report(completion("bits", [1, 2, 3]), completion("bits", [1, 2]))
    assert caught.value.exit_code == 1


def test_first_difference() -> None:
    assert _first_difference([1, 2], [1, 2]) is None
    assert _first_difference([1, 2], [1, 2, 3]) == 2
    assert _first_difference([], [3]) == 0
