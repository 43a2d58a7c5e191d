"""DFlash heads in the formats of z-lab, vLLM and speculators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.models.heads import BlockConfig
from tests.support.random_heads import (
    BLOCK,
    DFLASH2,
    DSPARK,
    MUTUAL,
    QWEN3,
    REDUCED,
    WINDOWED,
    folder_of,
    head_of,
    speculators,
)


def test_dflash_names_the_layers_that_it_reads(tmp_path: Path) -> None:
    own = {"mask_token_id": 63, "target_layer_ids": [1, 4]}
    config = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": own}
    config |= {"num_target_layers": 8, "layer_types": ["full_attention"] * 2, "use_sliding_window": False}
    read = open_head(folder_of(tmp_path / "a", config, dict(head_of(BLOCK).tensors)))
    assert (read.layout, read.target_layers) == ("reference", 8)
    assert read.config == BLOCK
    del own["target_layer_ids"]
    default = open_head(folder_of(tmp_path / "b", config, dict(head_of(BLOCK).tensors))).config
    assert default.taps == (2, 6)  # type: ignore[union-attr]  # DFlash: the outputs of layers 1 and L - 3 = 5


def test_dflash_may_have_rows_for_fewer_tokens(tmp_path: Path) -> None:
    few = replace(BLOCK, draft_vocab=16)
    config = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": 4, "draft_vocab_size": 16}
    config |= {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 4]}}
    read = open_head(folder_of(tmp_path / "a", config, dict(head_of(few).tensors)))
    assert read.config == few
    assert torch.equal(read.tensors["d2t"], head_of(few).tensors["d2t"])


def test_dflash_of_speculators_numbers_the_layers_it_enters(tmp_path: Path) -> None:
    config = speculators("dflash", block_size=4, mask_token_id=63, draft_vocab_size=64)
    config |= {"transformer_layer_config": QWEN3, "aux_hidden_state_layer_ids": [2, 5]}
    tensors = dict(head_of(BLOCK).tensors) | {n: torch.ones(64, 32) for n in ("embed_tokens.weight", "lm_head.weight")}
    read = open_head(folder_of(tmp_path / "a", config, tensors))
    assert read.config.taps == (2, 5)  # type: ignore[union-attr]
    assert set(read.tensors) == set(head_of(BLOCK).tensors)
    tensors = dict(head_of(REDUCED).tensors) | {"embed_tokens.weight": torch.ones(64, 32)}
    read = open_head(folder_of(tmp_path / "b", config | {"draft_vocab_size": 16, "sample_from_anchor": True}, tensors))
    assert read.config == REDUCED
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in head_of(REDUCED).tensors.items())
    assert "embed_tokens.weight" not in read.tensors


SLIDING = QWEN3 | {"use_sliding_window": True, "sliding_window": 7}
SLIDING |= {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("keys", "own", "causal"),
    [
        ({}, {}, (True, False)),
        ({}, {"causal": True}, (True, True)),
        ({}, {"causal": False}, ()),
        ({"is_causal": True}, {"causal": False}, (True, True)),
        ({"is_causal": False}, {"causal": True}, ()),
    ],
)
def test_dflash_is_causal_where_it_says_so_or_has_a_window(
    keys: dict[str, Any], own: dict[str, Any], causal: tuple[bool, ...], tmp_path: Path
) -> None:
    config = SLIDING | {"architectures": ["DFlashDraftModel"], "block_size": 4, **keys}
    config |= {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 4]} | own}
    read = open_head(folder_of(tmp_path / "a", config, dict(head_of(WINDOWED).tensors)))
    assert read.config == replace(WINDOWED, causal=causal)


@pytest.mark.parametrize(("mutual", "config"), [({}, WINDOWED), ({"sliding_window_non_causal": True}, MUTUAL)])
def test_windows_of_speculators_are_causal_unless_it_says_otherwise(
    mutual: dict[str, Any], config: BlockConfig, tmp_path: Path
) -> None:
    raw = speculators("dflash", block_size=4, mask_token_id=63, aux_hidden_state_layer_ids=[2, 5], **mutual)
    raw["transformer_layer_config"] = SLIDING
    assert open_head(folder_of(tmp_path / "a", raw, dict(head_of(config).tensors))).config == config


def test_a_window_as_wide_as_the_context_of_its_head_bounds_longer_texts(tmp_path: Path) -> None:
    raw = speculators("dflash", block_size=4, mask_token_id=63, aux_hidden_state_layer_ids=[2, 5])
    raw["transformer_layer_config"] = SLIDING | {"sliding_window": 256}
    read: Any = open_head(folder_of(tmp_path / "a", raw, dict(head_of(WINDOWED).tensors))).config
    assert [x.window for x in read.layer.plan] == [256, None]
    assert (read.causal, read.layer.context_length) == ((True, False), 256)


@pytest.mark.parametrize(
    ("keys", "own", "name"),
    [
        ({}, {"use_swa": True, "swa_window_size": 0}, "with use_swa, which"),
        (SLIDING, {"swa_window_size": 9}, "swa_window_size"),
        ({}, {"attention_sink_bias": True}, "attention_sink_bias"),
        ({"add_swa_attention_sink_bias": True}, {}, "add_swa_attention_sink_bias"),
        ({"attention_value_scale": 0.7}, {}, "attention_value_scale"),
        ({"is_neox_style": False}, {}, "is_neox_style"),
        ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
    ],
)
def test_unsupported_options_of_a_dflash_head_are_refused_by_name(
    keys: dict[str, Any], own: dict[str, Any], name: str, tmp_path: Path
) -> None:
    config = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": 4, **keys}
    config |= {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 4]} | own}
    with pytest.raises(UnsupportedModel, match=name):
        open_head(folder_of(tmp_path / "a", config, dict(head_of(BLOCK).tensors)))


def test_options_that_are_switched_off_are_accepted(tmp_path: Path) -> None:
    config = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": 4, "attention_value_scale": 1.0}
    own = {"mask_token_id": 63, "target_layer_ids": [1, 4], "use_swa": False, "swa_window_size": 9}
    config |= {"dflash_config": own | {"attention_sink_bias": False, "causal": None}}
    assert open_head(folder_of(tmp_path / "b", config, dict(head_of(BLOCK).tensors))).config == BLOCK


def test_a_separate_embedding_of_the_mask_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "a", head_of(BLOCK))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"mask_embedding\.pt"):
        open_head(folder)


@pytest.mark.parametrize(("key", "value"), [("projector_type", "domino"), ("shift_label", True)])
def test_variants_of_dflash_in_speculators_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "a", head_of(REDUCED))
    raw = json.loads((folder / "config.json").read_text()) | {key: value}
    with pytest.raises(UnsupportedModel, match=key):
        open_head(folder_of(folder, raw, dict(head_of(REDUCED).tensors)))


def test_dspark_as_its_authors_spell_it(tmp_path: Path) -> None:
    """The block's fields stand next to the layers' fields or in an object. Copies of target tensors are skipped."""
    copies = {name: torch.ones(64, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    tensors = {**head_of(DSPARK).tensors, **copies}
    own = {"mask_token_id": 63, "target_layer_ids": [1, 4], "markov_rank": 8, "markov_head_type": "vanilla"}
    base = QWEN3 | {"block_size": 4, "num_target_layers": 8}
    spelled = [own, {"dspark_config": own}, {"dflash_config": own}]
    for i, fields in enumerate(spelled):
        config = base | {"architectures": ["Qwen3DSparkModel"]} | fields
        read = open_head(folder_of(tmp_path / str(i), config, tensors))
        assert read.config == DSPARK
        assert {*read.tensors} == {*head_of(DSPARK).tensors}
    config = base | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    with pytest.raises(UnsupportedModel, match="which token its first entry predicts"):
        open_head(folder_of(tmp_path / "unclear", config, tensors))
    said = config | {"dflash_config": own | {"sample_from_anchor": True}}
    assert open_head(folder_of(tmp_path / "said", said, tensors)).config == DSPARK
    gated = said | {"dflash_config": own | {"sample_from_anchor": True, "markov_head_type": "gated"}}
    with pytest.raises(UnsupportedModel, match="markov_head_type"):
        open_head(folder_of(tmp_path / "gated", gated, tensors))


def test_dspark_of_speculators(tmp_path: Path) -> None:
    few = replace(DSPARK, draft_vocab=16)
    config = speculators("dspark", block_size=4, mask_token_id=63, draft_vocab_size=16, markov_rank=8)
    config |= {"transformer_layer_config": QWEN3, "aux_hidden_state_layer_ids": [2, 5], "sample_from_anchor": True}
    read = open_head(folder_of(tmp_path / "a", config, dict(head_of(few).tensors)))
    assert read.config == few
    tensors = {name: x for name, x in head_of(few).tensors.items() if "w2" not in name}
    folder = folder_of(tmp_path / "b", config, tensors)
    with pytest.raises(CorruptModel, match=r"lacks markov_head\.markov_w2\.weight"):
        open_head(folder)


CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16}


def dflash2(own: dict[str, Any], **keys: Any) -> dict[str, Any]:
    config = QWEN3 | {"architectures": ["DFlash2DraftModel"], "num_target_layers": 8, "is_causal": False, **keys}
    return config | {"dflash_config": {"block_size": 4, "mask_token_id": 63, "target_layer_ids": [1, 4]} | own}


def test_dflash_2_as_its_authors_spell_it(tmp_path: Path) -> None:
    """z-lab's config.json also has the block size in `dflash_config`. Others list all fields next to the layers."""
    tensors = dict(head_of(DFLASH2).tensors)
    for i, config in enumerate([dflash2(CONVOLVED), dflash2({}, **CONVOLVED)]):
        read = open_head(folder_of(tmp_path / str(i), config, tensors))
        assert (read.layout, read.target_layers, read.config) == ("reference", 8, DFLASH2)
        assert {*read.tensors} == {*tensors}
    config = dflash2(CONVOLVED) | {key: value for key, value in SLIDING.items() if key not in QWEN3}
    windowed = replace(MUTUAL, conv=2, conv_group=16, selector=8, candidates=16)
    assert open_head(folder_of(tmp_path / "windowed", config, tensors)).config == windowed
    folder = write_head(tmp_path / "written", head_of(DFLASH2))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    assert open_head(folder).config == DFLASH2


@pytest.mark.parametrize(("key", "cause"), [(key, f"lacks {key}") for key in CONVOLVED])
def test_dflash_2_without_one_of_its_sizes_is_refused(key: str, cause: str, tmp_path: Path) -> None:
    own = {name: value for name, value in CONVOLVED.items() if name != key}
    with pytest.raises(CorruptModel, match=cause):
        open_head(folder_of(tmp_path / "a", dflash2(own), dict(head_of(DFLASH2).tensors)))


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        ({"conv_kernel_size": 5}, "convolves 5 entries of a block of 4"),
        ({"conv_group_size": 12}, "groups of 12 of 32 channels"),
        ({"selector_top_k": 65}, "selects from 65 of 64 tokens"),
        ({"selector_rank": 9}, r"candidate_selector\..* of the head"),
        ({"conv_group_size": 8}, r"layers\.0\.attention_conv\.kernel_projection\.weight of the head"),
    ],
)
def test_sizes_of_dflash_2_that_contradict_each_other_are_refused(
    own: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptModel, match=cause):
        open_head(folder_of(tmp_path / "a", dflash2(CONVOLVED | own), dict(head_of(DFLASH2).tensors)))


@pytest.mark.parametrize(
    "own",
    [
        {"attention_mode": "mla"},
        {"input_embedding_scale": 2.0},
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
        {"sample_from_anchor": True},
        {"markov_rank": 8, "sample_from_anchor": False},
    ],
)
def test_unsupported_parts_of_dflash_2_are_refused_by_name(own: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(own))
    with pytest.raises(UnsupportedModel, match=f"with {name}, which"):
        open_head(folder_of(tmp_path / "a", dflash2(CONVOLVED | own), dict(head_of(DFLASH2).tensors)))
