"""--adapter: an adapter without a name is merged, and a named adapter is not merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoints.adapters import Adapter
from paceline.cli.adapters import parse_adapters
from paceline.errors import InvalidOption

MIX = '{"name": "mix", "path": ["a", "b"], "weights": [0.7, 0.3], "drafter": "ngram"}'


def test_values_of_the_option(tmp_path: Path) -> None:
    assert parse_adapters([]) == (None, {})
    assert parse_adapters(["folder"]) == ("folder", {})
    mix = Adapter(["a", "b"], [0.7, 0.3], "ngram")
    assert parse_adapters(["sql=dir", "folder", MIX]) == ("folder", {"sql": "dir", "mix": mix})
    (tmp_path / "a=b").mkdir()
    assert parse_adapters([str(tmp_path / "a=b")]) == (str(tmp_path / "a=b"), {})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a", "b"], "only one adapter can be merged, got 2"),
        (["x=a", "x=b"], "two adapters have the name x"),
        (["{"], "is not an adapter"),
        (['{"path": "a"}'], "is not an adapter .KeyError"),
        (['{"name": "a", "path": "b", "rank": 3}'], "is not an adapter .TypeError"),
        (['{"name": "a", "path": []}'], "names no adapter"),
    ],
)
def test_malformed_values(texts: list[str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        parse_adapters(texts)
