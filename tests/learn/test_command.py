"""`paceline learn`, and what `paceline serve --learn` refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.learn.folder import open_folder, open_key_folder
from tests.support.toy_cli import failure, run


def test_status_and_forget(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "l")
    key_folder = open_key_folder(folder, None)
    key_folder.traffic.write_text("x" * 2000)
    gain = {"value": 1.24, "low": 1.15, "high": 1.33}
    key_folder.write_status({"gain": gain, "switched": True})
    shown = run("learn", "--status", str(folder))
    assert shown.exit_code == 0
    assert "all: 2 kB of traffic; last head: 1.24 times as fast (1.15 to 1.33) as before, in use" in shown.stdout
    (row,) = map(json.loads, run("learn", "--status", str(folder), "--json").stdout.splitlines())
    assert row == {"key": "all", "traffic": 2000, "training": False, "last": key_folder.status()}
    assert run("learn", "--forget", str(folder)).exit_code == 0
    assert not folder.exists()
    assert "not a folder of --learn" in failure(run("learn", "--forget", str(tmp_path)))
    assert tmp_path.exists()


@pytest.mark.parametrize("options", [(), ("--status", "a", "--forget", "a")])
def test_learn_does_one_thing(options: tuple[str, ...]) -> None:
    assert "--status DIR or --forget DIR" in failure(run("learn", *options))


@pytest.mark.parametrize("options", [("--record", "r.jsonl"), ("--models", "."), ("--drafter", "none")])
def test_learning_refuses_what_it_does_not_work_with(tmp_path: Path, options: tuple[str, ...]) -> None:
    message = failure(run("serve", "demo", "--learn", str(tmp_path / "l"), *options))
    assert f"--learn does not work with {options[0]}" in message
    assert not (tmp_path / "l").exists()
