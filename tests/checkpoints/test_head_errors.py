"""Heads that are damaged, incomplete or made for another target: each gives one error with its cause and a fix."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import fit_to_target
from paceline.checkpoints.head_write import write_head
from paceline.errors import CorruptModel, HeadMismatch, ModelNotFound, PacelineError, UnsupportedModel
from paceline.models.config import NormConfig
from paceline.models.heads import EagleConfig, HeadConfig
from paceline.testing.tiny import TINY
from tests.support.random_heads import BLOCK, COMPACT, EAGLE3, EXIT, LAYER, LLAMA, MEDUSA, folder_of, head_of

TARGET = replace(LAYER, layers=8)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def configured(folder: Path, **keys: object) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    return folder


def swapped(x: Tensor) -> Tensor:
    """Exchange the tokens of rows 3 and 4."""
    tokens = torch.arange(16) + x
    tokens[[3, 4]] = tokens[[4, 3]]
    return tokens - torch.arange(16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("norm.weight"), r"lacks norm\.weight"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "lacks d2t"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].clone()}),
            r"fc\.weight .* shape \(32, 96\).*\(32, 95\)",
        ),
        (lambda t: t.update({"layers.3.x": torch.ones(1)}), r"holds layers\.3\.x, which its config does not"),
        (lambda t: t["norm.weight"].fill_(torch.nan), r"norm\.weight .* NaN"),
        (lambda t: t["lm_head.weight"][3].fill_(torch.inf), r"lm_head\.weight .* NaN or infinity"),
        (lambda t: t["d2t"][15].fill_(50), "token 65, outside the vocabulary of 64"),
        (lambda t: t["d2t"][0].fill_(-1), "token -1, outside the vocabulary of 64"),
        (lambda t: t["d2t"][1].sub_(3), "names a token twice"),
        (lambda t: t.update(d2t=swapped(t["d2t"])), "not in ascending order"),
        (lambda t: t["d2t"][0].fill_(0), "name different tokens"),
        (lambda t: t.update(d2t=t["d2t"].float() + 0.5), "d2t of the head .* must hold integers"),
        (lambda t: t.update(d2t=t["d2t"][:, None].clone()), r"d2t .* got \(16, 1\)"),
    ],
)
def test_tensors_that_contradict_their_config(change: Callable[..., object], said: str, tmp_path: Path) -> None:
    folder = changed(write_head(tmp_path / "head", head_of(EAGLE3)), change)
    with pytest.raises(CorruptModel, match=said):
        open_head(folder)


def test_rows_are_missed_where_no_target_can_lend_them(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16, "norm_output": True}
    config |= {"fc_norm": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    sglang = folder_of(tmp_path / "sglang", config, dict(head_of(EAGLE3).tensors))
    narrow = write_head(tmp_path / "narrow", head_of(replace(EAGLE3, target_hidden=40)))
    for folder in (sglang, narrow):
        open_head(folder)
        with pytest.raises(CorruptModel, match=r"lacks lm_head\.weight"):
            open_head(changed(folder, lambda t: t.pop("lm_head.weight")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lacks lm_head\.weight"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "lacks d2t"),
        (lambda t: t["d2t"][15].fill_(50), "token 65, outside the vocabulary of 64"),
        (lambda t: t.update(d2t=swapped(t["d2t"])), "not in ascending order"),
        (lambda t: t["d2t"][0].fill_(0), "name different tokens"),
    ],
)
def test_a_block_drafter_with_fewer_tokens_needs_their_rows_and_ids(
    change: Callable[..., object], said: str, tmp_path: Path
) -> None:
    folder = changed(write_head(tmp_path / "head", head_of(replace(BLOCK, draft_vocab=16))), change)
    with pytest.raises(CorruptModel, match=said):
        open_head(folder)


@pytest.mark.parametrize("path", [(), (0, -1), (True,)])
def test_invalid_paths_of_ranks_are_refused_on_write_and_read(path: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(
        CorruptModel, match=rf"has the path {re.escape(str(list(path)))}; paths must be lists of ranks >= 0"
    ):
        write_head(tmp_path / "new", head_of(replace(COMPACT, paths=((0,), path))))
    folder = write_head(tmp_path / "head", head_of(COMPACT))
    own = json.loads((folder / "config.json").read_text())["paceline"]
    with pytest.raises(CorruptModel, match=r"paths must be lists of ranks|paths must be"):
        open_head(configured(folder, paceline=own | {"paths": [[0], list(path)]}))


def test_each_layer_of_a_block_drafter_is_causal_or_not(tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="marks 1 of 2 layers causal or not"):
        write_head(tmp_path / "head", head_of(replace(BLOCK, causal=(True,))))


def test_a_map_of_medusa_stays_in_the_vocabulary(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(replace(COMPACT, draft_vocab=20)))
    with pytest.raises(CorruptModel, match=r"token_map .* token 64"):
        open_head(changed(folder, lambda t: t["token_map"][3].fill_(64)))


def test_quantised_weights_are_not_read(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EXIT))
    with pytest.raises(UnsupportedModel, match=r"norm\.weight .* torch\.int8"):
        open_head(changed(folder, lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int8)})))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be .* got 'many'"),
        ({"draft_vocab_size": 17}, "shape"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be an object, got null"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -2]}, r"layer_ids must be .* got \[1, -2\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"holds fc_norm\.2\.weight"),
    ],
)
def test_configs_that_make_no_sense(keys: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = configured(write_head(tmp_path / "head", head_of(EAGLE3)), **keys)
    with pytest.raises(CorruptModel, match=said):
        open_head(folder)


def test_layers_that_are_missing_and_windows_are_refused(tmp_path: Path) -> None:
    folder = write_head(
        tmp_path / "head", head_of(replace(EAGLE3, layer=replace(LAYER, norms=NormConfig(heads="shared"))))
    )
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert layer["model_type"] == "qwen3"
    with pytest.raises(CorruptModel, match=r"lacks layers\.1\.self_attn"):
        open_head(configured(folder, transformer_layer_config=layer | {"num_hidden_layers": 2}))
    sliding = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"]}
    with pytest.raises(UnsupportedModel, match="sliding window"):
        open_head(configured(folder, transformer_layer_config=layer | sliding))


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EAGLE3))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptModel, match="damaged or cut off"):
        open_head(folder)
    weights.unlink()
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors"):
        open_head(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match="not valid JSON"):
        open_head(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        open_head(folder)
    with pytest.raises(ModelNotFound, match="no model"):
        open_head(tmp_path / "absent")


class Code:
    """An object with a function that pickle would run."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/paceline-was-run",)


def test_a_pickle_that_holds_code_is_not_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", {"medusa_num_heads": 2}, {}, "medusa_lm_head.pt")
    for data in (pickle.dumps({"0.0.linear.weight": Code()}), b"\x80\x02broken"):
        (folder / "medusa_lm_head.pt").write_bytes(data)
        with pytest.raises(CorruptModel, match="cannot be read as plain tensors"):
            open_head(folder, allow_pickle=True)
    assert not Path("/tmp/paceline-was-run").exists()
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(UnsupportedModel, match="allow_pickle"):
        open_head(folder)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [({}, "lacks blocks.0.layers.0.weight"), ({"0.x.weight": torch.ones(1)}, r"holds the unknown tensor 0\.x\.weight")],
)
def test_a_medusa_head_without_its_blocks(tensors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", {"medusa_num_heads": 2}, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(CorruptModel, match=said):
        open_head(folder)


def test_a_medusa_head_that_skips_one(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(MEDUSA))
    with pytest.raises(CorruptModel, match=r"lacks blocks\.1\.layers\.0\.weight"):
        open_head(changed(folder, lambda t: t.pop("blocks.1.layers.0.weight")))


@pytest.mark.parametrize("paths", [[[0], []], [[0, -1]], [[True]], ["0"], [0], 7])
def test_a_medusa_tree_of_no_places(paths: object, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(COMPACT))
    with pytest.raises(CorruptModel, match=r"paths must be lists of ranks|paths must be"):
        open_head(configured(folder, paceline={"paths": paths}))


def test_a_model_is_no_head(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", {"model_type": "llama", "num_hidden_layers": 2}, {"x": torch.ones(1)})
    with pytest.raises(UnsupportedModel, match=r"no learned drafter.*model:REF"):
        open_head(folder)


# --- Another target


def test_a_head_that_fits_is_given_its_default_taps() -> None:
    head = head_of(replace(EAGLE3, taps=()))
    assert fit_to_target(head, TARGET).config.taps == (2, 4, 5)  # type: ignore[union-attr]
    assert fit_to_target(replace(head, target_layers=None), replace(TARGET, layers=30)).config.taps == (2, 15, 27)  # type: ignore[union-attr]
    for config in (EAGLE3, MEDUSA, COMPACT, BLOCK, EXIT):
        assert fit_to_target(head_of(config), TARGET).config == config


OTHERS: list[tuple[dict[str, int], str]] = [
    ({"hidden": 48}, "hidden size of 32, and this target has 48"),
    ({"layers": 9}, "target of 8 layers, and this one has 9"),
    ({"vocab_size": 65}, "vocabulary of 64, and this target has 65"),
]


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        *((config, *other) for config in (EAGLE3, MEDUSA, BLOCK) for other in OTHERS),
        *((EXIT, *other) for other in OTHERS[:2]),  # which has no vocabulary of its own
    ],
)
def test_another_target_is_told_with_both_numbers(config: HeadConfig, change: dict[str, int], said: str) -> None:
    with pytest.raises(HeadMismatch, match=f"{said}.*trained for owner/name"):
        fit_to_target(head_of(config), replace(TARGET, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [EAGLE3, BLOCK, EXIT, replace(EAGLE3, taps=())])
def test_a_tap_beyond_the_target_is_refused(config: HeadConfig) -> None:
    layers = 3 if config == EXIT else 5
    with pytest.raises(HeadMismatch, match=f"this target has .*{layers}"):
        fit_to_target(replace(head_of(config), target_layers=None), replace(TARGET, layers=layers))


def test_every_error_names_a_fix(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EAGLE3))
    assert isinstance(EAGLE3, EagleConfig)
    for act in (lambda: fit_to_target(open_head(folder), TINY), lambda: open_head(tmp_path)):
        with pytest.raises(PacelineError) as caught:
            act()
        assert caught.value.cause
        assert caught.value.fix
