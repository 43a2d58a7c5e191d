"""Every script in examples/ runs as it is, and prints what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.conftest import packaged_model
from tests.support.cover import some

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PRINTED = {
    "batch.py": r"Name three colours\. \(2\) (.*\n)+as alone: True\n",
    "client.py": r"'drafter': 'ngram'",
    "drafter.py": r"\b([1-9]|1\d) rounds instead of (3|4)\d\b",
    "generate.py": r"the same text without a drafter: True\n",
    "stream.py": r"\[.+\](.*\n)+\d+ tokens in \d+ rounds; [1-9]\d* of \d+ drafted tokens accepted\n",
    "structured.py": r"\{'city': .*'population_in_millions': \d+\}",
}
NEEDS = {"structured.py": "llguidance", "client.py": "openai"}


@pytest.mark.model
@some("name", PRINTED.keys(), fast=["generate.py"])
def test_the_script_prints_what_it_promises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    with packaged_model("demo"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)


def test_every_script_is_short_and_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys()
    for name in PRINTED:
        assert len((EXAMPLES / name).read_text().splitlines()) < 40
        assert f"[{name}]({name})" in readme
