"""--help shows common options, and --help-all shows every option."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.commands import EVERYDAY

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(*args: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, list(args), prog_name="paceline", env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= columns
    return result.stdout


def options(text: str) -> list[str]:
    """Return the first name of each option in a help text."""
    return re.findall(r"^│ (?:[* ]  )?(--[a-z-]+)", text, re.MULTILINE)


def names(command: str) -> list[str]:
    """Return the first name of each option of a command."""
    params = COMMANDS[command].params
    return [param.opts[0] for param in params if param.param_type_name == "option"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_everyday_options_and_where_the_others_are(command: str, columns: int) -> None:
    text = shown(command, "--help", columns=columns)
    everyday = [f"--{name}" for name in EVERYDAY[command].split()]
    assert options(text) == [*everyday, "--help"]
    assert len(everyday) <= 10
    assert text.count("╭") <= 2, "arguments and options, no further panels"
    assert len(text.splitlines()) <= 55, "one screen"
    hidden = set(names(command)) - {*everyday, "--help-all"}
    assert text.rstrip().endswith(f"More options: paceline {command} --help-all") == bool(hidden)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option_by_subject(command: str) -> None:
    text = shown(command, "--help-all")
    assert sorted(options(text)) == sorted([*names(command), "--help"])
    assert "More options" not in text
    if len(names(command)) > 15:
        assert text.count("╭") >= 4


def test_explanations_are_left_to_help_all() -> None:
    assert "With match, the text" not in shown("generate", "--help", columns=120)
    full = shown("generate", "--help-all", columns=120)
    for part in ("With match, the text", "REF@ADAPTER merges", "NODESxDEPTHxBRANCH"):
        assert part in full
    assert "--max-tokens" in full
    for panel in ("Sampling", "Speculation", "Model and memory", "Structured output", "Input and output"):
        assert f"─ {panel} ─" in full


def test_commands_are_listed_with_a_line_each() -> None:
    text = shown("--help").partition("─ Commands ─")[2]
    listed = re.findall(r"^│ ([a-z]+) +\S.*\. +│$", text, re.MULTILINE)
    assert listed == list(COMMANDS) == list(EVERYDAY)
    assert listed[:3] == ["generate", "chat", "serve"]
    assert text.count("│\n") == len(listed), "no description takes a second line"
    assert text.rstrip().endswith("Show the options of a command: paceline COMMAND --help")
