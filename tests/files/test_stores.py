"""Models on the disk: what each store holds, under names that find it; and what may be deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from paceline.errors import InvalidOption, ModelNotFound
from paceline.files import stores
from paceline.files.locate import resolve
from paceline.files.names import ALIASES
from paceline.files.stores import find_model, models_in, remove_model, stored_models

GGUF = b"GGUF" + bytes(96)


def write(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "client"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def ollama(folder: Path, name: str, digit: str, media: str = "application/vnd.ollama.image.model") -> Path:
    """A model in Ollama's layout."""
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64, "size": 5},
        {"mediaType": media, "digest": "sha256:" + digit * 64, "size": len(GGUF)},
    ]
    write(folder / name, json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}).encode())
    return write(folder / f"blobs/sha256-{digit * 64}")


def test_an_empty_disk(home: Path) -> None:
    assert [model for model in stored_models(True) if model.store != "ollama"] == []
    with pytest.raises(ModelNotFound, match="on this machine"):
        find_model("qwen3:0.6b")


def test_downloaded_models_are_listed(home: Path) -> None:
    models = home / "cache/models"
    write(models / ALIASES["qwen3:0.6b"] / "Qwen3-0.6B-Q4_K_M.gguf")
    write(models / ALIASES["qwen3:0.6b"] / ".Qwen3-0.6B-Q8_0.gguf.0123.incomplete")
    parts = [write(models / f"owner/big/Q8_0/Big-Q8_0-{i:05}-of-00002.gguf") for i in (1, 2)]
    found = {model.name: model for model in stored_models()}
    assert set(found) == {"qwen3:0.6b:Q4_K_M", "owner/big:Q8_0"}
    assert found["owner/big:Q8_0"][1:] == (parts[0], 200, "paceline")
    assert resolve("owner/big:Q8_0") == resolve("owner/big") == parts[0]
    assert resolve("qwen3:0.6b:Q4_K_M").name == resolve("qwen3:0.6b").name == "Qwen3-0.6B-Q4_K_M.gguf"
    assert find_model("qwen3:0.6b") == found["qwen3:0.6b:Q4_K_M"]
    write(models / ALIASES["qwen3:0.6b"] / "Qwen3-0.6B-Q8_0.gguf")
    with pytest.raises(ModelNotFound, match=r"Use qwen3:0.6b:Q4_K_M or qwen3:0.6b:Q8_0"):
        find_model("qwen3:0.6b")
    remove_model(find_model("qwen3:0.6b:Q8_0"))
    remove_model(find_model("owner/big:Q8_0"))
    assert not any(part.exists() for part in parts)
    assert [model.name for model in stored_models()] == ["qwen3:0.6b:Q4_K_M"]


def test_models_in_the_hub_clients_cache_are_found(home: Path) -> None:
    for name in ("one", "two"):
        folder = home / f"client/models--owner--{name}"
        write(folder / "refs/main", b"c" * 40)
        snapshot = folder / "snapshots" / ("c" * 40)
        blob = write(folder / "blobs/aaaa", GGUF)
        snapshot.mkdir(parents=True)
        if name == "one":
            (snapshot / "m-Q4_0.gguf").symlink_to(blob)
        else:
            (snapshot / "model.safetensors").symlink_to(blob)
            write(snapshot / "config.json", b"{}")
    found = {model.name: model for model in stored_models()}
    assert {name: model.store for name, model in found.items()} == {
        "owner/one:Q4_0": "huggingface",
        "owner/two": "huggingface",
    }
    assert resolve("owner/one:Q4_0") == found["owner/one:Q4_0"].path
    remove_model(found["owner/one:Q4_0"])
    assert not (home / "client/models--owner--one/blobs/aaaa").exists()
    remove_model(found["owner/two"])
    assert stored_models() == []


@pytest.mark.parametrize("manifests", ["manifests/registry.ollama.ai", "manifest-v2/ollama.com"])
def test_ollamas_store(home: Path, manifests: str) -> None:
    folder = home / ".ollama/models"
    blob = ollama(folder, f"{manifests}/library/llama3.2/1b", "a")
    ollama(folder, f"{manifests}/someone/tuned/latest", "b")
    ollama(folder, "manifests/hf.co/owner/name-GGUF/Q4_K_M", "c")
    ollama(folder, f"{manifests}/library/other/1b", "d", media="application/vnd.ollama.image.tensor")
    write(folder / f"{manifests}/library/damaged/1b", b'{"layers": [{"mediaType"')
    write(folder / f"{manifests}/library/odd/1b", b'{"layers": 7}')
    write(folder / f"{manifests}/library/huge/1b", b" " * (stores._MAX_MANIFEST_BYTES + 1))
    elsewhere = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../x"}
    write(folder / f"{manifests}/library/sly/1b", json.dumps({"layers": [elsewhere]}).encode())
    names = [model.name for model in stored_models(True)]
    assert names == ["ollama:hf.co/owner/name-GGUF:Q4_K_M", "ollama:llama3.2:1b", "ollama:someone/tuned:latest"]
    assert resolve("ollama:llama3.2:1b") == blob
    assert stored_models() == []
    with pytest.raises(InvalidOption, match="ollama rm"):
        remove_model(find_model("ollama:llama3.2:1b"))
    with pytest.raises(ModelNotFound, match="list --all"):
        resolve("ollama:llama3.2:99b")


def test_ollamas_store_where_its_variable_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    blob = ollama(home / "elsewhere", "manifests/registry.ollama.ai/library/a/b", "a")
    assert resolve("ollama:a:b") == blob


def test_lm_studios_store(home: Path) -> None:
    path = write(home / ".lmstudio/models/infra-ai/ocelot-v1/ocelot-v1-instruct-q4_0.gguf")
    name = "lmstudio:infra-ai/ocelot-v1/ocelot-v1-instruct-q4_0"
    assert [model.name for model in stored_models(True)] == [name]
    assert resolve(name) == path
    with pytest.raises(InvalidOption, match="LM Studio"):
        remove_model(find_model(name))


def test_a_folder_of_models(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "x/same.gguf")
    write(tmp_path / "y/same.gguf")
    for i in (1, 2):
        write(tmp_path / f"deep/er/big-{i:05}-of-00002.gguf")
    write(tmp_path / "folder/config.json", b"{}")
    write(tmp_path / "folder/model.safetensors")
    write(tmp_path / "empty/config.json", b"{}")
    write(tmp_path / "mmproj-a.gguf")
    found = {model.name: model.path.relative_to(tmp_path).as_posix() for model in models_in(tmp_path)}
    assert found == {
        "a": "a.gguf",
        "x/same": "x/same.gguf",
        "y/same": "y/same.gguf",
        "big": "deep/er/big-00001-of-00002.gguf",
        "folder": "folder",
    }
    assert [model.name for model in models_in(tmp_path, subfolders=False)] == ["a", "folder"]
    with pytest.raises(ModelNotFound, match="no folder"):
        models_in(tmp_path / "a.gguf")
