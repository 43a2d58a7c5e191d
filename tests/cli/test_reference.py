"""The generated reference pages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from docs.cli_reference import ENVIRONMENT, environment, markdown

import paceline
from paceline.kernels.torch_variables import RUNNING, TRAINING

ROOT = Path(__file__).parents[2]


def test_every_command_and_option_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    page = markdown()
    commands = re.findall(r"^## paceline ([a-z]+)$", page, re.MULTILINE)
    assert {"generate", "chat", "serve", "bench", "train", "compile"} <= set(commands)
    generate = page.partition("## paceline generate\n")[2].partition("\n## ")[0]
    for part in (
        "paceline generate [OPTIONS] [MODEL] [PROMPT]",
        "`-n, --max-tokens, --max-new-tokens",
        "`--json-schema",
        "$HF_TOKEN",
        "**Sampling**",
    ):
        assert part in generate
    assert "`-V, --version` |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}, "no cell breaks its row"
    runpy.run_path(str(ROOT / "docs" / "cli_reference.py"), run_name="__main__")
    assert capsys.readouterr().out == page


def test_every_environment_variable_that_the_code_names_is_in_the_reference() -> None:
    pattern = r"""(?:environ(?:\.get|\.setdefault)?[(\[]|envvar=|getenv\()\s*"([A-Z_]+)\""""
    files = Path(paceline.__file__).parent.rglob("*.py")
    found = {name for file in files for name in re.findall(pattern, file.read_text("utf-8"))} | {*RUNNING, *TRAINING}
    assert {
        "PACELINE_CACHE",
        "PACELINE_ISA",
        "PACELINE_NATIVE",
        "PACELINE_API_KEY",
        "HF_TOKEN",
        "CXX",
        "NO_COLOR",
    } <= found
    assert found == set(ENVIRONMENT)
    assert all(f"| `{name}` |" in environment() for name in found)
