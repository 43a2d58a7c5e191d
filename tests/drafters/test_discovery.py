"""The drafter that `found` selects for a target: its own head, a smaller model with the same vocabulary, or suffix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.head_fit import fingerprint
from paceline.checkpoints.loader import Loaded, load_model
from paceline.drafters import discovery
from paceline.drafters.factory import open_drafter, resolve_spec
from paceline.drafters.stack import DrafterStack
from paceline.errors import HeadMismatch, InvalidOption
from paceline.files.stores import StoredModel
from paceline.llm import load
from tests.support.gguf_writing import Q, write_gguf


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Return a folder with only a float32 GGUF, because a float16 file has more than half its size."""
    monkeypatch.setattr(discovery, "stored_models", lambda everything: [])
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "large.gguf")
    return load_model(folder / "large.gguf")


def head(folder: Path, of: str) -> None:
    folder.mkdir()
    about = {"architectures": ["LlamaForCausalLMEagle3"], "paceline": {"kind": "eagle3", "fingerprint": of}}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"")


def test_nothing_is_found(target: Loaded) -> None:
    folder = target.path.parent
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    write_gguf(folder / "other-words.gguf", kind=Q.Q4_0, tokens=["b", "a", "ab", "<s>", "</s>"])
    write_gguf(folder / "too-large.gguf", kind=Q.F16)
    head(folder / "head", of="0" * 32 + ":" + "f" * 256)
    assert resolve_spec("found", target) == "suffix"


def test_the_smallest_model_with_the_same_vocabulary(target: Loaded) -> None:
    folder = target.path.parent
    write_gguf(folder / "small.gguf", kind=Q.Q8_0)
    write_gguf(folder / "smallest.gguf", kind=Q.Q4_0)
    assert resolve_spec("found", target) == f"suffix+model:{folder / 'smallest.gguf'}"


def test_a_model_in_a_store(target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "blob"
    write_gguf(path, kind=Q.Q4_0)
    stored = StoredModel("ollama:a:b", path, path.stat().st_size, "ollama")
    monkeypatch.setattr(discovery, "stored_models", lambda everything: [stored] if everything else [])
    assert resolve_spec("found", target) == f"suffix+model:{path}"


def test_many_small_models_of_other_vocabularies_hide_none(target: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = target.path.parent, list[Path]()

    def counted(path: Path) -> Any:
        opened.append(path)
        return open_checkpoint(path)

    monkeypatch.setattr(discovery, "open_checkpoint", counted)
    for i in range(50):
        unrelated(folder / f"other-{i}", vocab_size=7)
    write_gguf(folder / "small.gguf", kind=Q.Q4_0)
    assert resolve_spec("found", target) == f"suffix+model:{folder / 'small.gguf'}"
    assert opened == [folder / "small.gguf"]
    for i in range(50):
        unrelated(folder / f"alike-{i}", vocab_size=5)
    opened.clear()
    assert resolve_spec("found", target) == "suffix"
    assert len(opened) == discovery._MAX_VOCABULARIES_READ, "no more are opened"


def unrelated(folder: Path, vocab_size: int) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("fits", [True, False])
def test_a_published_head_that_names_the_target(
    target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    def checked(*_: Any) -> None:
        if not fits:
            raise HeadMismatch("it expects another size", "Use another")

    paths = {name: tmp_path / name.replace("/", "-") for name in ("eagle/other", "eagle/mine")}
    for path, verifier in zip(paths.values(), ("meta/other", "meta/target"), strict=True):
        head(path, of="")
        about = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": verifier}}}
        (path / "config.json").write_text(json.dumps(about))
    held = {"meta/target": target.path, **paths}
    stored = [StoredModel(name, path, target.path.stat().st_size, "huggingface") for name, path in held.items()]
    monkeypatch.setattr(discovery, "stored_models", lambda everything: stored)
    monkeypatch.setattr(discovery, "open_head", lambda path: path)
    monkeypatch.setattr(discovery, "fit_to_target", checked)
    assert resolve_spec("found", target) == (f"suffix+head:{paths['eagle/mine']}" if fits else "suffix")


def test_a_head_goes_before_a_model(target: Loaded) -> None:
    folder = target.path.parent
    write_gguf(folder / "smallest.gguf", kind=Q.Q4_0)
    head(folder / "my-head", of=fingerprint(target))
    assert resolve_spec("found", target) == f"suffix+head:{folder / 'my-head'}"


def test_load_accepts_the_drafter_found(target: Loaded) -> None:
    folder = target.path.parent
    write_gguf(folder / "smallest.gguf", kind=Q.Q4_0)
    llm = load(target.path, drafter=["found", "suffix"], draft=2)
    assert [policy.name for policy in llm.engine.policies] == ["suffix+model:smallest.gguf", "suffix"]
    assert isinstance(open_drafter("found", target), DrafterStack)
    plain = load(target.path, drafter=None)
    assert llm.generate("abab", max_new_tokens=8).token_ids == plain.generate("abab", max_new_tokens=8).token_ids
    with pytest.raises(InvalidOption, match="found"):
        load(target.path, drafter="suffix+found")
