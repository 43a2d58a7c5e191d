"""Every script in examples/ runs, with a toy in the fast tier, and unchanged in the slow tier."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.text.tokenizer import Tokenizer
from tests.conftest import packaged_model
from tests.support.toys import TEMPLATE
from tests.support.vocabularies import byte_level, speaker

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAYS = {
    "batch.py": r"Why is the sky blue\? \(1\) .+ \(2\) .+as alone: (True|False)\n",
    "client.py": r"5.+\{.*'accepted'.*\}\n",
    "drafter.py": r"\d+ rounds instead of \d+\n",
    "generate.py": r"tokens per round, guarantee: \w+\nthe same text without a drafter: (True|False)\n",
    "stream.py": r"\d+ tokens in \d+ rounds; \d+ of \d+ drafted tokens accepted\n( +\w+ +[0-9.]+ ms\n){5}",
    "structured.py": r"\{'city': .+\}\n\d+ tokens in \d+ rounds\n",
}
"""Expected output of each script. The scripts themselves assert that texts are the same without a drafter."""
NEEDS = {"structured.py": "llguidance", "client.py": "openai"}


def run_script(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.search(SAYS[name], shown, re.DOTALL)
    return shown


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", SAYS)
def test_the_script_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with packaged_model("demo"):
        run_script(name, capsys)


@pytest.mark.parametrize("name", [name for name in SAYS if name != "client.py"])
def test_the_script_runs_with_a_toy(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = byte_level()
    model = speaker(Tokenizer(words._backend, words.special_tokens, TEMPLATE), seed=3)
    monkeypatch.setattr("paceline.load", lambda name, drafter="suffix": LLM(model, Suffix() if drafter else None))
    shown = run_script(name, capsys)
    assert "False" not in shown, "in float64 the text is the same"


def test_there_are_six_short_scripts_and_each_is_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SAYS)
    for name in SAYS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 40
        assert f"[{name}]({name})" in readme
