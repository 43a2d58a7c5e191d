"""Options of `paceline serve`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.commands import parsed
from paceline.cli.serve import application
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.llm import LLM
from paceline.recording.file import Recording
from paceline.server.limits import Settings
from paceline.server.models import Models, ModelSource
from paceline.server.worker import Worker
from tests.support.hub_server import hub_server
from tests.support.toys import toy_llm, toy_model

NAME = "--served-model-name"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """Record the models of every server, without starting it."""
    found: list[Models] = []

    def made(models: Models, _settings: Settings) -> None:
        found.append(models)

    monkeypatch.setattr("paceline.server.app.create_app", made)
    monkeypatch.setattr("paceline.server.listen.run", lambda *_: None)
    monkeypatch.setattr("paceline.server.listen.check_address", lambda *_: ["127.0.0.1"])
    command = import_module("paceline.cli.serve")
    monkeypatch.setattr(command.LoadFlags, "load", lambda *_, **__: toy_llm())
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
def test_record_begins_a_recording_that_only_its_owner_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, path = toy_llm(), tmp_path / "r.jsonl"
    monkeypatch.setattr(import_module("paceline.cli.serve").LoadFlags, "load", lambda *_, **__: llm)

    def serve(*_: Any) -> None:
        llm.generate("hello", max_new_tokens=5)

    monkeypatch.setattr("paceline.server.listen.run", serve)
    done = CliRunner().invoke(app, ["serve", "--quiet", "--record", str(path)])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(Recording(path)) == 1


def test_models_of_folders_are_loaded_on_request(started: list[Models], tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf", "my-model.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" * 100)
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (head / "model.safetensors").write_bytes(b"x")
    more = ["--models", str(tmp_path), "--max-memory", "2", "--keep-alive", "-1", "--quiet", "--drafter", "none"]
    (tmp_path / "here").mkdir()
    mine = tmp_path / "here/my-model"
    mine.write_bytes(b"GGUF")
    done = CliRunner().invoke(app, ["serve", str(mine), *more])
    assert done.exit_code == 0, done.output
    names = [source.names for source in started[0].sources]
    assert names == [("my-model",), ("one",), ("two",)], "MODEL goes before another of its name; heads are no models"
    assert [started[0].get(name) is not None for (name,) in names] == [True, False, False]
    assert [source.size for source in started[0].sources] == [0, 500, 500]
    assert started[0].pull is None, "what is pulled is not in the folder"
    done = CliRunner().invoke(app, ["serve", *more])
    assert done.exit_code == 0, done.output
    assert [source.names for source in started[1].sources] == [("my-model",), ("one",), ("two",)]
    assert started[1].get(None) is None, "without MODEL nothing is loaded before the first request"


def test_a_model_of_a_folder_is_not_served_twice(started: list[Models], tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"GGUF" * 100)
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "one.gguf")
    more = ["--models", str(tmp_path), "--quiet", "--drafter", "none"]
    done = CliRunner().invoke(app, ["serve", str(link), *more])
    assert done.exit_code == 0, done.output
    assert started[0].names == ["link.gguf", "link", "one"]
    assert len(started[0].sources) == 1
    done = CliRunner().invoke(app, ["serve", str(link), *more, "--adapter", "sql=./sql-lora"])
    assert done.exit_code == 0, done.output
    assert started[1].names == ["link.gguf", "sql", "link", "one"]
    assert len(started[1].sources) == 1, "an adapter that is not merged does not change the weights"


def test_models_pulled_over_the_network_are_served(
    started: list[Models], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "client"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(
        app, ["serve", "--models", "pulled", "--max-memory", "0.001", "--quiet", "--model", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    models = started[0]
    assert models.pull
    small, large = {"small-Q8_0.gguf": b"GGUF" * 1000}, {"large-Q8_0.gguf": b"GGUF" * 300_000}
    monkeypatch.setenv("HF_TOKEN", "hf_operator")
    with hub_server({"owner/small": small, "owner/large": large}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        seen: list[tuple[str, int, int]] = []
        for name in ("owner/small", "owner/small:Q8_0"):
            models.add(models.pull(name, lambda *step: seen.append(step)))
        assert hub.authorizations == {None}, "clients have nothing of the operator's account"
        assert seen[-1] == ("small-Q8_0.gguf", 4000, 4000)
        assert models.names[-2:] == ["owner/small", "owner/small:Q8_0"]
        assert [source.size for source in models.sources[1:]] == [5000]
        with pytest.raises(UnsupportedModel, match=r"large-Q8_0.gguf has 0.0 GB, but at most 0.0 GB are allowed"):
            models.pull("owner/large", lambda *_: None)
        with pytest.raises(ModelNotFound, match="there is no model 'none'"):
            models.pull("none", lambda *_: None)
        assert not list((tmp_path / "cache").glob("**/large*"))


@pytest.mark.usefixtures("started")
def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--models", str(tmp_path), "--record", str(tmp_path / "r")])
    assert "--record works only with one model" in done.output
    done = CliRunner().invoke(app, ["serve", "--models", str(tmp_path)])
    assert "there is no model in" in done.output


@pytest.mark.parametrize(
    ("drafter", "asked", "default"),
    [
        ("auto", ["found", "suffix", "ngram"], "suffix"),
        ("none", ["suffix", "ngram"], None),
        ("ngram", ["ngram"], "ngram"),
    ],
)
def test_the_drafter_of_replies(
    started: list[Models], monkeypatch: Any, drafter: str, asked: Any, default: Any
) -> None:
    seen: list[Any] = []

    def load(*_: Any, drafter: Any, **__: Any) -> LLM:
        seen.append(drafter)
        made = {"suffix": Suffix(), "ngram": NGram()}
        return LLM(toy_model(), {name: made[name] for name in drafter if name in made})

    monkeypatch.setattr(import_module("paceline.cli.serve").LoadFlags, "load", load)
    done = CliRunner().invoke(app, ["serve", "--quiet", "--drafter", drafter])
    assert done.exit_code == 0, done.output
    model = started[0].get(None)
    assert model
    assert seen[0][: len(asked)] == asked
    assert model.worker.default.drafter == default


def test_the_server_says_where_it_is_and_what_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    suffix = LLM(toy_model(), {"suffix": Suffix()})
    one = ModelSource(("m",), lambda: Worker(suffix), stays=True)
    others = [ModelSource((name,), lambda: Worker(suffix)) for name in "ab"]
    announce = import_module("paceline.cli.serve")._announce
    announce(Models([one]), True, False, "http://127.0.0.1:1")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "ready: m (drafter: suffix) at http://127.0.0.1:1/v1 and in a browser at http://127.0.0.1:1/"
    assert said[1].startswith("memory: ")
    assert len(said) == 2
    announce(Models([one, *others]), False, False, "http://0.0.0.0:1")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("ready: m (drafter: suffix) and 2 models on request at http://0.0.0.0:1/v1 ")
    assert "anyone who can reach" in said[2]
    announce(Models(others), True, True, "http://127.0.0.1:1")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("started")
def test_the_server_says_that_it_loads() -> None:
    said = CliRunner().invoke(app, ["serve", "--model", "/srv/my-model"]).stderr.splitlines()
    assert said[0] == "loading /srv/my-model"
    assert re.fullmatch(r"loaded /srv/my-model in \d+\.\d s", said[1])
    assert CliRunner().invoke(app, ["serve", "--model", "/srv/my-model", "--quiet"]).stderr == ""


def test_options_by_name_make_the_same_application(started: list[Models]) -> None:
    given = {"model": "/srv/my-model", "drafter": "none", "served_model_name": ["one", "two"], "slots": "3"}
    context = parsed(application, {**given, "log_prompts": "true", "quiet": False, "port": 0})
    assert not started, "parsed, but not run"
    assert (context.params["slots"], context.params["log_prompts"], context.params["quiet"]) == (3, True, False)
    assert context.command.invoke(context).models is started[0]
    assert started[0].sources[0].names == ("one", "two")
    for wrong, message in (({"modle": "x"}, "No such option: --modle"), ({"slots": 0}, "greater|range")):
        with pytest.raises(Exception, match=message):
            parsed(application, wrong)
