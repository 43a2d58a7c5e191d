"""Tiny random models of families with recurrent layers: logits of golden files and of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoints.checkpoint import open_weights
from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.registry import text_config
from paceline.checkpoints.tensor_names import decoder_tensors
from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from paceline.types import Draft, Want
from paceline.verify.tree import MIN_ROWS, pack
from tests.support.golden import check_golden, decoder, models, read
from tests.support.logits import CPU, check_chunks, check_path, chunks_and_tokens, feed, text
from tests.support.tiny_families import HYBRIDS


@pytest.mark.parametrize("case", HYBRIDS)
def test_logits_are_the_golden_ones_in_chunks_and_token_by_token(case: str) -> None:
    check_golden(case, (100, 102, 145))


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRIDS)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    check_chunks(*models(case), 150, (100, 102, 135))


LONGER = ("mamba-2", "lfm2", "qwen3.5")


@pytest.mark.parametrize("case", HYBRIDS)
def test_a_drafted_nodes_logits_equal_its_path_fed_plainly(case: str) -> None:
    check_path(decoder(case), decoder(case), 253 if case in LONGER else 47)


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRIDS)
@pytest.mark.parametrize("length", [47, 253])
def test_a_drafted_nodes_logits_equal_its_path(case: str, length: int) -> None:
    check_path(*models(case), length)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("case", HYBRIDS)
def test_the_kernels_compute_the_golden_logits_in_one_call(case: str) -> None:
    """Qwen3-Next's shared expert is wider than the others (32 and 24, both padded to 32)."""
    ours, golden = decoder(case, torch.float32), read(case)
    assert ours.runs_natively
    logits = chunks_and_tokens(ours, golden.text[:70], (33, 35, 65))
    at = [position for position in golden.logits if position < 70]
    expected = torch.tensor([golden.logits[position] for position in at])
    assert float((logits[at] - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 1), (torch.float64, MIN_ROWS)])
def test_only_torch_computes_padding_rows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int) -> None:
    ours, seen = decoder("qwen3.5", dtype), list[int]()
    cache, norm = ours.new_cache(), ours.norm
    slot = cache.acquire(4)
    monkeypatch.setattr(ours, "norm", lambda x: seen.append(x.shape[1]) or norm(x))
    ours.forward(pack([7], [Draft.chain([])], [slot], [0], CPU), cache, Want())
    assert seen == [rows]


def test_a_vision_model_runs_as_a_language_model(tmp_path: Path) -> None:
    """The tensor names are as in Qwen3.5's files, with stacked experts and MTP layers."""
    theirs, ours = models("qwen3.5 moe")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    outer |= {"text_config": config, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in theirs.state_dict().items()}
    assert any("experts.gate_up_proj" in name for name in tensors)
    tensors |= {"model.visual.patch_embed.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file({name: x.clone() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    config = text_config(json.loads((tmp_path / "config.json").read_text()))
    weights = open_weights(tmp_path, "model.safetensors", "", False)
    again = Decoder(read_config(config), decoder_tensors(config, weights), torch.float64, CPU)
    tokens = text(9)
    caches = [model.new_cache() for model in (ours, again)]
    one, other = (feed(m, c, c.acquire(), tokens) for m, c in zip((ours, again), caches, strict=True))
    # On AMD, torch's float64 sums depend on where a weight lies in memory.
    assert float((one - other).abs().max()) < 1e-12
