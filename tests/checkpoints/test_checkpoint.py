"""Valid and damaged folders in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint
from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.text.tokenizer import Tokenizer

TENSORS = {"model.norm.weight": torch.arange(4.0), "lm_head.weight": torch.ones(3, 4, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small complete checkpoint with one safetensors file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    Backend(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path) -> dict[str, str]:
    """Split the tensors into two files. Return the weight_map of the index."""
    (folder / "model.safetensors").unlink()
    where = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        where[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / where[name])
    write_index(folder, where)
    return where


def write_index(folder: Path, where: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def check(folder: Path, **options: bool) -> None:
    tensors = open_checkpoint(folder, **options).tensors
    assert set(tensors) == set(TENSORS)
    assert len(tensors) == 2
    assert "nothing" not in tensors
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_one_file(folder: Path) -> None:
    check(folder)
    opened = open_checkpoint(folder)
    assert opened.config["model_type"] == "llama"
    assert opened.tokenizer.vocab_size == 3
    assert eos_token_ids(opened.config, opened.generation, opened.tokenizer) == (2, 7)


def test_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation == {}


def test_shards(folder: Path) -> None:
    shard(folder)
    check(folder)


def test_a_missing_shard(folder: Path) -> None:
    (folder / shard(folder)["lm_head.weight"]).unlink()
    with pytest.raises(CorruptModel, match=r"model-1\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_shard_without_its_tensor(folder: Path) -> None:
    where = shard(folder)
    write_index(folder, {**where, "model.extra": where["lm_head.weight"]})
    with pytest.raises(CorruptModel, match=r"model-1\.safetensors lacks model\.extra"):
        open_checkpoint(folder)


@pytest.mark.parametrize("where", [{}, [], {"a": "../elsewhere.safetensors"}, {"a": 3}])
def test_a_bad_index(folder: Path, where: Any) -> None:
    shard(folder)
    write_index(folder, where)
    with pytest.raises(CorruptModel, match=r"index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("damage", [b"", b"12345678", b"\xff" * 64, None])
def test_damaged_safetensors(folder: Path, damage: bytes | None) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_bad_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CorruptModel, match=name):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", ModelNotFound),
        ("model.safetensors", ModelNotFound),
        ("tokenizer.json", UnsupportedModel),
    ],
)
def test_missing_files(folder: Path, name: str, error: type[Exception]) -> None:
    (folder / name).unlink()
    with pytest.raises(error, match=name.replace(".", r"\.")):
        open_checkpoint(folder)


def test_pickles_need_allow_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(TENSORS, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="allow_pickle"):
        open_checkpoint(folder)
    check(folder, allow_pickle=True)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


@pytest.mark.parametrize("content", [Evil(), {"a": 3}, None])
def test_bad_pickles(folder: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CorruptModel, match=r"pytorch_model\.bin"):
        open_checkpoint(folder, allow_pickle=True)
    assert capsys.readouterr().out == ""


def test_no_memory_is_not_a_damaged_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("torch.frombuffer", fail)
    with pytest.raises(MemoryError):
        open_checkpoint(folder).tensors["model.norm.weight"]


def test_quantised_folders_and_adapters(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModel, match="gptq"):
        open_checkpoint(folder)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(UnsupportedModel, match="adapter"):
        open_checkpoint(folder)


def test_eos_ids() -> None:
    tokenizer = Tokenizer(Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[])), {"eos_token": "b"})
    assert eos_token_ids({"eos_token_id": [5, 3]}, {"eos_token_id": 3}, tokenizer) == (5, 3)
    assert eos_token_ids({}, {"eos_token_id": None}, tokenizer) == (1,)
    assert eos_token_ids({}, {}) == ()
    with pytest.raises(CorruptModel, match="eos_token_id"):
        eos_token_ids({"eos_token_id": "</s>"}, {})
