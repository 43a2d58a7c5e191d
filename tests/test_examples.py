"""Every script in examples/ runs as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.conftest import packaged_model

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
NEEDS = {"structured.py": "llguidance", "client.py": "openai"}


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_script_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    with packaged_model("demo"):
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_six_short_scripts_and_each_is_in_the_readme() -> None:
    readme = (EXAMPLES[0].parent / "README.md").read_text()
    assert len(EXAMPLES) == 6
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 40
        assert f"[{path.name}]({path.name})" in readme
