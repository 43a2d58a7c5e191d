"""Vision towers from mmproj files of llama.cpp's converter, and the choice of a file by the loader."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.checkpoints.mmproj import read_projector
from paceline.checkpoints.vision import open_vision
from paceline.errors import CorruptModel, InvalidOption
from paceline.models.config import ModelConfig
from paceline.testing import TINY
from paceline.vision.encoder import Vision
from paceline.vision.families import VISION
from tests.support.seeing import chat, picture

_GOLDEN = Path(__file__).parents[1] / "golden" / "mmproj"
_CPU = torch.device("cpu")


def _wide() -> ModelConfig:
    return replace(TINY, hidden=64)


@pytest.mark.parametrize("name", ["gemma3", "lfm2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_a_tower_of_an_mmproj_file_encodes_as_the_original(name: str) -> None:
    found = read_projector(_GOLDEN / f"{name}.gguf")
    vision = Vision(VISION[found.kind], found.config, found.tensors, found.settings, torch.float32, _CPU)
    pictures = (picture(40, 70, 1), picture(64, 30, 3), picture(250, 140, 4))
    for number, expected in load_file(_GOLDEN / f"{name}.safetensors").items():
        image = vision.encode(pictures[int(number)])
        assert torch.allclose(torch.stack([image.embeddings, *image.deep]), expected, atol=1e-5)


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_pair_of_files_writes_the_same_text_as_the_original(drafter: str, tmp_path: Path) -> None:
    for name, file in (("model-f32.gguf", "smolvlm-text.gguf"), ("mmproj-model-f32.gguf", "smolvlm.gguf")):
        shutil.copy(_GOLDEN / file, tmp_path / name)
    llm = paceline.load(tmp_path / "model-f32.gguf", dtype="float32", drafter=drafter)
    reply = llm.generate(chat("look", picture(64, 64, 1), "what?"), max_new_tokens=24, temperature=0)
    assert list(reply.token_ids) == json.loads((_GOLDEN / "smolvlm-reply.json").read_text("utf-8"))


def test_a_projector_next_to_the_model_is_found_and_must_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "model-Q4_0.gguf"
    model.touch()
    assert open_vision(model, torch.float32, _CPU, False, TINY) is None
    shutil.copy(_GOLDEN / "smolvlm.gguf", tmp_path / "mmproj-model-f16.gguf")
    found = open_vision(model, torch.float32, _CPU, False, TINY)
    assert found
    assert found.name == "idefics3"
    assert not caplog.records
    assert open_vision(model, torch.float32, _CPU, False, _wide()) is None
    assert "runs as text" in caplog.text


def test_a_given_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file, model = _GOLDEN / "smolvlm.gguf", tmp_path / "model.gguf"
    with pytest.raises(InvalidOption, match="only works with a GGUF file"):
        open_vision(tmp_path, torch.float32, _CPU, mmproj=file)
    model.touch()
    with pytest.raises(CorruptModel, match="embeddings of size 32"):
        open_vision(model, torch.float32, _CPU, False, _wide(), mmproj=file)
    with pytest.raises(CorruptModel, match="no sections of M-RoPE"):
        open_vision(model, torch.float32, _CPU, False, TINY, mmproj=_GOLDEN / "qwen3_vl.gguf")
