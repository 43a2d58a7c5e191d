"""Learned drafters on disk: every layout is read, and every written layout is read back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoints.head_files import holds_head, open_head
from paceline.checkpoints.head_write import write_head
from paceline.errors import CannotWrite, InvalidOption, UnsupportedModel
from paceline.models.config import LayerConfig, NormConfig
from paceline.models.heads import EagleConfig, HeadConfig, HeadFile, MedusaConfig, kind_of
from tests.support.random_heads import (
    BLOCK,
    COMPACT,
    EAGLE,
    EAGLE3,
    EXIT,
    LAYER,
    LLAMA,
    MEDUSA,
    MUTUAL,
    QWEN,
    REDUCED,
    WINDOWED,
    folder_of,
    head_of,
    speculators,
    token_maps,
)

FLAGGED = replace(EAGLE3, norm_output=False, fc_norm=False, norm_before_residual=True, norm_before_fc=True)
NORMED = replace(EAGLE3, layer=replace(LAYER, family="qwen3", norms=NormConfig(1e-5, heads="shared")))
NARROW = replace(EAGLE3, target_hidden=40)
FULL = replace(EAGLE3, draft_vocab=64)
LONG = replace(EAGLE3, layer=replace(LAYER, rope=replace(LAYER.rope, kind="linear", scaling=(("factor", 4.0),))))
CROSSED = replace(WINDOWED, causal=(False, True))
BROAD = replace(QWEN, special=(LayerConfig(QWEN.rope, window=7), LayerConfig(QWEN.rope, window=9)))
TURNED = replace(QWEN, special=(LayerConfig(None), LayerConfig(QWEN.rope)))
MAPPED = replace(MEDUSA, draft_vocab=20)
LLAMA4 = LLAMA | {"model_type": "llama4_text"}

WRITTEN: list[tuple[HeadConfig, str]] = [
    *((config, "speculators") for config in (EAGLE3, FLAGGED, NORMED, NARROW, FULL, LONG, replace(EAGLE3, taps=()))),
    *((config, "paceline") for config in (MEDUSA, MAPPED, COMPACT, replace(COMPACT, draft_vocab=20))),
    *((config, "reference") for config in (BLOCK, WINDOWED, MUTUAL)),
    *((replace(config, causal=(True, True)), "reference") for config in (BLOCK, WINDOWED)),
    *((replace(config, draft_vocab=16), "speculators") for config in (BLOCK, WINDOWED, MUTUAL)),
    *((c, "speculators") for c in (REDUCED, replace(WINDOWED, from_anchor=True), replace(BLOCK, taps=(0, 5)))),
    (EXIT, "paceline"),
    (replace(EXIT, rank=0), "paceline"),
]


@pytest.mark.parametrize(("config", "layout"), WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_heads_read_the_same(config: HeadConfig, layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    head = head_of(config, dtype)
    read = open_head(write_head(tmp_path / "head", head))
    assert read.config == config
    assert (read.layout, read.target, read.target_layers, read.extra) == (layout, "owner/name", 8, head.extra)
    assert set(read.tensors) - set(head.tensors) <= {"d2t", "t2d"}
    for name, tensor in head.tensors.items():
        assert torch.equal(read.tensors[name], tensor), name
        assert read.tensors[name].dtype == tensor.dtype, name


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (CROSSED, "this choice of causal layers"),
        (replace(CROSSED, from_anchor=True), "this choice of causal layers"),
        (replace(BLOCK, causal=(True, True), from_anchor=True), "this choice of causal layers"),
        (replace(BLOCK, taps=(2, "final")), "the tap final"),
        (replace(REDUCED, taps=(2, "final")), "the tap final"),
        *((replace(config, layer=BROAD), "windows of several widths") for config in (BLOCK, REDUCED)),
        (replace(BLOCK, layer=TURNED), "rotary embeddings by layer"),
        (EAGLE, "EAGLE-1 and 2"),
    ],
)
def test_heads_that_a_layout_cannot_express_are_refused(config: HeadConfig, word: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=word):
        write_head(tmp_path / "head", head_of(config))
    assert not list(tmp_path.iterdir())


# --- The layouts of other projects, spelled as they write them


def midlayer(head: HeadFile) -> dict[str, torch.Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}


def test_the_eagle3_reference_is_read_from_its_pickle_and_leaves_taps_to_the_target(tmp_path: Path) -> None:
    plain = replace(EAGLE3, taps=(), norm_output=False, fc_norm=False)
    head = head_of(plain)
    folder = folder_of(
        tmp_path / "a", LLAMA | {"draft_vocab_size": 16, "bias": True}, midlayer(head), "pytorch_model.bin"
    )
    with pytest.raises(UnsupportedModel, match="allow_pickle"):
        open_head(folder)
    read = open_head(folder, allow_pickle=True)
    assert (read.layout, read.config) == ("reference", plain)
    assert torch.equal(read.tensors["layers.0.hidden_norm.weight"], head.tensors["layers.0.hidden_norm.weight"])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_specforge_numbers_the_layers_whose_output_it_takes(prefix: str, tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16, "fc_norm": True}
    config |= {"norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    config |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 48}
    # The layer is still Llama's.
    config |= {"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1]}
    tensors = {prefix + name: tensor for name, tensor in midlayer(head_of(EAGLE3)).items()}
    read = open_head(folder_of(tmp_path / "a", config, tensors))
    assert (read.layout, read.config) == ("sglang", EAGLE3)


def test_layer_ids_beside_the_config_number_the_layers_they_enter(tmp_path: Path) -> None:
    config = LLAMA | {"draft_vocab_size": 16, "fc_norm": True, "norm_output": True}
    config |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert open_head(folder_of(tmp_path / "a", config, midlayer(head_of(EAGLE3)))).config == EAGLE3


def test_eagle_1_has_the_config_of_a_llama_and_no_tokenizer(tmp_path: Path) -> None:
    head = head_of(EAGLE)
    tensors = dict(head.tensors) | {"fc.bias": torch.zeros(32), "embed_tokens.weight": torch.ones(64, 32)}
    tensors["lm_head.weight"] = torch.ones(64, 32)
    folder = folder_of(tmp_path / "a", LLAMA | {"architectures": ["LlamaForCausalLM"]}, tensors)
    read = open_head(folder)
    assert read.config == EAGLE
    assert set(read.tensors) == set(tensors) - {"lm_head.weight"}
    (folder / "tokenizer.json").write_text("{}")
    assert not holds_head(folder)


def test_speculators_names_a_default_of_taps_none(tmp_path: Path) -> None:
    config = speculators("eagle3", draft_vocab_size=16, fc_norm=True, norm_output=True)
    tensors = dict(head_of(EAGLE3).tensors) | {"embed_tokens.weight": torch.ones(64, 32)}
    read = open_head(folder_of(tmp_path / "a", config, tensors))
    assert (read.layout, read.target, read.config) == ("speculators", "owner/name", replace(EAGLE3, taps=()))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (speculators("mtp"), "MTP"),
        (speculators("dflash2"), "DFlash 2 head in the layout of speculators"),
        (speculators("medusa9"), "type 'medusa9'"),
        (speculators("eagle3", transformer_layer_config=LLAMA4), "layers of llama4_text"),
        (LLAMA4 | {"architectures": ["EagleLlama4ForCausalLM"]}, "layers of llama4_text"),
    ],
)
def test_unsupported_kinds_are_refused_by_name(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", config, {"fc.weight": torch.ones(2, 2)})
    with pytest.raises(UnsupportedModel, match=name):
        open_head(folder)


def test_medusa_counts_its_tensors_and_not_its_config(tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in head_of(MEDUSA).tensors.items():
        kind, head, *rest = name.split(".")
        tensors[f"{head}.{rest[1]}.linear.weight" if kind == "blocks" else f"{head}.2.weight"] = tensor
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "owner/name"}
    for folder, file in (("a", "medusa_lm_head.pt"), ("b", "medusa_lm_head.safetensors")):
        read = open_head(folder_of(tmp_path / folder, config, tensors, file), allow_pickle=True)
        assert (read.layout, read.config, read.target) == ("reference", MEDUSA, "owner/name")
        assert torch.equal(read.tensors["blocks.2.layers.1.weight"], tensors["2.1.linear.weight"])


def test_medusa_of_vllm_may_hold_one_head_for_all_and_cut_it_itself(tmp_path: Path) -> None:
    own = MedusaConfig(32, 64, 2, 1, draft_vocab=20)
    tensors = {f"medusa_heads.{n}": x for n, x in head_of(own).tensors.items() if not n.startswith("lm_heads")}
    tensors["lm_heads.0.weight"] = whole = torch.randn(64, 32)
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 32, "vocab_size": 64}
    config |= {"num_heads": 5, "num_hidden_layers": 1, "truncated_vocab_size": 20, "original_lm_head": True}
    read = open_head(folder_of(tmp_path / "a", config, tensors))
    assert read.config == own
    rows = tensors["medusa_heads.token_map"]
    assert all(torch.equal(read.tensors[f"lm_heads.{i}.weight"], whole[rows]) for i in range(2))


def test_speculators_may_leave_the_rows_of_the_head_to_the_target(tmp_path: Path) -> None:
    head = head_of(EAGLE3)
    tensors = {name: tensor for name, tensor in head.tensors.items() if name not in ("lm_head.weight", "d2t")}
    read = open_head(write_head(tmp_path / "a", replace(head, tensors=tensors)))
    assert read.config == EAGLE3
    assert set(read.tensors) == {*tensors, "d2t"}
    assert torch.equal(read.tensors["d2t"], head.tensors["d2t"])


@pytest.mark.parametrize("config", [EAGLE3, REDUCED])
def test_d2t_is_sufficient_to_compute_t2d(config: HeadConfig, tmp_path: Path) -> None:
    head = head_of(config)
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != "t2d"}
    tensors["d2t"] = tensors["d2t"].int()
    read = open_head(write_head(tmp_path / "a", replace(head, tensors=tensors)))
    assert torch.equal(read.tensors["t2d"], token_maps(torch.arange(16) * 3 + 1, 64)["t2d"])
    assert read.tensors["d2t"].dtype == torch.int64


def test_kinds_have_the_names_that_users_write() -> None:
    configs = (EAGLE3, EAGLE, MEDUSA, BLOCK, EXIT)
    assert [kind_of(c) for c in configs] == ["eagle3", "eagle", "medusa", "block", "exit"]
    assert isinstance(EAGLE, EagleConfig)
    assert QWEN.norms.heads


# --- Writing


def test_a_head_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "deep" / "head", head_of(EAGLE3))
    (folder / "left-over").write_text("x")
    write_head(folder, head_of(COMPACT))
    assert open_head(folder).config == COMPACT
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    model = folder_of(tmp_path / "model", LLAMA | {"num_hidden_layers": 2}, {"x": torch.ones(1)})
    for taken in (model, model / "config.json"):
        with pytest.raises(InvalidOption, match="holds no head"):
            write_head(taken, head_of(EXIT))
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 2
    write_head(tmp_path / "empty", head_of(EXIT))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "model"]


@pytest.mark.parametrize("config", [EAGLE3, MEDUSA])
def test_a_full_disk_leaves_what_was_there(config: HeadConfig, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    folder = write_head(tmp_path / "head", head_of(EXIT))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # no file beyond 4 KiB
    try:
        with pytest.raises(CannotWrite, match="Check free disk space"):
            write_head(folder, head_of(config))
        with pytest.raises(CannotWrite):
            write_head(tmp_path / "new", head_of(config))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert open_head(folder).config == EXIT
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_old_files_are_restored_if_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_head(tmp_path / "head", head_of(EXIT))
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise PermissionError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CannotWrite, match="no"):
        write_head(folder, head_of(EAGLE3))
    assert open_head(folder).config == EXIT
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_folder_that_cannot_be_created_gives_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot write the head"):
        write_head(tmp_path / "file" / "head", head_of(EXIT))


def test_a_loaded_head_can_be_saved_again(tmp_path: Path) -> None:
    """Tensors in a file are ordered by name, with the token map first."""
    read = open_head(write_head(tmp_path / "a", head_of(EAGLE3, torch.bfloat16)))
    ordered = {name: read.tensors[name].clone() for name in sorted(read.tensors)}
    again = open_head(write_head(tmp_path / "b", replace(read, tensors=ordered)))
    assert again.config == read.config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in ordered.items())
