"""`paceline pull`, `list`, `show`, `run` and `rm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from huggingface_hub import constants

from paceline.cli import app
from paceline.files.names import ALIASES
from tests.support.hub_server import hub_server
from tests.support.toy_cli import failure, run

GGUF = b"GGUF" + bytes(1000)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "client"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "no"))
    return tmp_path


def test_a_model_comes_and_goes(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ALIASES["qwen3:0.6b"]
    assert "paceline pull" in run("list").stderr
    with hub_server({name: {"Qwen3-0.6B-Q4_K_M.gguf": GGUF, "Qwen3-0.6B-Q8_0.gguf": GGUF + b"8"}}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        done = run("pull", "qwen3:0.6b:Q8_0")
        assert done.exit_code == 0, done.output
        path = disk / f"cache/models/{name}/Qwen3-0.6B-Q8_0.gguf"
        assert done.stderr.endswith(f"{path}\nChat with it: paceline run qwen3:0.6b:Q8_0\n")
        hub.repositories[name]["Qwen3-0.6B-Q8_0.gguf"] += b" newer"
        assert run("pull", "qwen3:0.6b:Q8_0", "--quiet").exit_code == 0
        assert path.read_bytes() == GGUF + b"8 newer"
    assert run("list").stdout == "qwen3:0.6b:Q8_0  1.01 kB  paceline\n"
    assert json.loads(run("list", "--json").stdout) == [
        {"name": "qwen3:0.6b:Q8_0", "path": str(path), "size": 1011, "store": "paceline"}
    ]
    assert "Deleted qwen3:0.6b:Q8_0" in run("rm", "qwen3:0.6b:Q8_0").stderr
    assert not path.exists()
    assert "no model 'qwen3:0.6b:Q8_0' on this machine" in failure(run("rm", "qwen3:0.6b:Q8_0"))


def test_all_shows_other_programs_models(disk: Path) -> None:
    path = disk / ".lmstudio/models/a/b/c.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(GGUF)
    assert run("list").stdout == ""
    assert run("list", "--all").stdout == "lmstudio:a/b/c  1 kB  lmstudio\n"


def test_run_is_chat_with_a_prompt_and_show_is_info() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {name: [param.opts for param in command.params] for name, command in commands.items()}
    only_run = [["words"], ["--image"]]
    assert [name for name in names["run"] if name not in only_run] == names["chat"]
    assert names["show"] == names["info"]
    assert commands["show"].help == commands["info"].help
