"""What `paceline serve` makes of its options."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.recording.file import Recording
from paceline.server.limits import Settings
from paceline.server.models import Models
from tests.toys import toy_llm

NAME = "--served-model-name"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """The models of every server that is started; none is."""
    found: list[Models] = []

    def made(models: Models, _settings: Settings) -> None:
        found.append(models)

    monkeypatch.setattr("paceline.server.app.create_app", made)
    monkeypatch.setattr("paceline.server.listen.run", lambda *_: None)
    monkeypatch.setattr("paceline.server.listen.check_address", lambda *_: None)
    command = import_module("paceline.cli.serve")
    monkeypatch.setattr(command.LoadOptions, "load", lambda *_, **__: toy_llm())
    monkeypatch.setattr(command, "_set_up_logging", lambda _quiet: None)
    return found


@pytest.mark.parametrize(
    ("options", "model", "aliases"),
    [
        ([], "my-model", []),
        ([NAME, "one"], "one", []),
        ([NAME, "one", NAME, "a/two", NAME, "one"], "one", ["a/two"]),
    ],
)
def test_a_model_may_have_several_names(started: list[Models], options: list[str], model: str, aliases: Any) -> None:
    done = CliRunner().invoke(app, ["serve", "--model", "/srv/my-model", "--quiet", "--drafter", "none", *options])
    assert done.exit_code == 0, done.output
    assert started[0].sources[0].names == (model, *aliases)


@pytest.mark.usefixtures("started")
def test_record_begins_a_recording_that_its_owner_alone_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, path = toy_llm(), tmp_path / "r.jsonl"
    monkeypatch.setattr(import_module("paceline.cli.serve").LoadOptions, "load", lambda *_, **__: llm)

    def serve(*_: Any) -> None:
        llm.generate("hello", max_new_tokens=5)

    monkeypatch.setattr("paceline.server.listen.run", serve)
    done = CliRunner().invoke(app, ["serve", "--quiet", "--record", str(path)])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(Recording(path)) == 1
