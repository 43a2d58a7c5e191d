"""Heads with matrices stored in 4 bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints.head_check import shapes_of
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.drafters.eagle import Eagle
from paceline.drafters.factory import open_drafter
from paceline.errors import CorruptModel
from paceline.kernels.cpu.build import library
from paceline.kernels.quantize import GROUP, quantize
from paceline.llm import LLM
from paceline.models.heads import EagleConfig, ExitConfig, HeadConfig, HeadFile, MedusaConfig
from paceline.models.lazy import codes_of, stored_of
from paceline.sampling.parameters import Sampling
from paceline.testing import tiny_target
from paceline.train.kinds import one_layer
from tests.support.toys import loaded

TARGET = tiny_target(dtype=torch.float32, layers=4)
LAYER = one_layer(TARGET.config, 64)
EAGLE = EagleConfig(LAYER, (1, 2, 3), LAYER.hidden, 24, fc_norm=True)
KINDS: list[HeadConfig] = [
    EAGLE,
    MedusaConfig(LAYER.hidden, LAYER.vocab_size, 2, shared=True),
    ExitConfig(LAYER.hidden, 2, 32),
]


def made(folder: Path, config: HeadConfig = EAGLE, bits: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes_of(config)[0].items()}
    if "d2t" in tensors:
        del tensors["t2d"]
        tensors["d2t"] = torch.full((24,), 3)
    write_head(folder, HeadFile(folder, "", config, tensors), bits)
    return tensors


@pytest.mark.parametrize("config", KINDS, ids=["eagle3", "medusa", "exit"])
def test_codes_equal_the_codes_that_loading_would_make(config: HeadConfig, tmp_path: Path) -> None:
    tensors = made(tmp_path / "head", config)
    read = open_head(tmp_path / "head")
    assert read.config == config
    assert read.tensors.keys() >= tensors.keys()
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            codes, expected = codes_of(read.tensors, name), quantize(tensor, 4)
            assert codes is not None
            assert torch.equal(codes.codes, expected.codes)
            assert torch.equal(read.tensors[name], expected.dequantised())
        else:
            assert torch.equal(read.tensors[name].to(tensor), tensor)


def test_a_coded_head_drafts_what_its_floats_draft_at_four_bits(tmp_path: Path) -> None:
    for bits in (4, 16):
        made(tmp_path / str(bits), bits=bits)
    drafted = []
    for bits in (4, 16):
        drafter = open_drafter(f"eagle3:{tmp_path / str(bits)}", loaded(TARGET), "auto" if bits == 4 else "int4")
        reply = LLM(loaded(TARGET), drafter).generate("abc", Sampling(max_new_tokens=24))
        drafted.append((reply.token_ids, reply.stats.rounds, reply.stats.accepted))
    assert drafted[0] == drafted[1]
    assert stored_of(open_head(tmp_path / "4").tensors, "fc.weight") is not None


@pytest.mark.skipif(library() is None, reason="codes are the CPU kernels'")
@pytest.mark.parametrize(
    ("target", "asked", "few"), [("int8", "auto", True), ("int8", "none", False), (None, "auto", False)]
)
def test_a_float_eagle_head_gets_4_bits_with_a_quantised_target(
    target: str | None, asked: Any, few: bool, tmp_path: Path
) -> None:
    made(tmp_path / "head", bits=16)
    drafter = open_drafter(f"eagle3:{tmp_path / 'head'}", replace(loaded(TARGET), quantize=target), asked)
    assert isinstance(drafter, Eagle)
    assert (len(drafter._net._input._fc.weight()[0, :GROUP].unique()) <= 16) == few


def test_damaged_codes_are_named(tmp_path: Path) -> None:
    made(tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    whole = load_file(file)
    for cut in (whole["fc.weight"][:, :-1], whole["fc.weight"][:, :-20], whole["fc.weight"].flatten()):
        save_file(whole | {"fc.weight": cut.contiguous()}, file)
        with pytest.raises(CorruptModel, match=r"fc\.weight"):
            open_head(tmp_path / "head")
    infinite = whole["fc.weight"].clone()
    infinite[0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    save_file(whole | {"fc.weight": infinite}, file)
    with pytest.raises(CorruptModel, match="NaN or infinity"):
        open_head(tmp_path / "head")


def test_a_quantised_head_is_saved_as_floats(tmp_path: Path) -> None:
    made(tmp_path / "head")
    head = open_head(tmp_path / "head")
    write_head(tmp_path / "again", head)
    assert "matrices" not in json.loads((tmp_path / "again/config.json").read_text())["paceline"]
    again = open_head(tmp_path / "again")
    assert all(torch.equal(head.tensors[name], again.tensors[name]) for name in head.tensors)
