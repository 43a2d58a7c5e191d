"""Gemma 4 against transformers, on tiny random models read back from disk."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.engine.self_check import guarantee
from paceline.kernels.linear import packs_bfloat16
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from paceline.models.tensor_names import translated
from paceline.types import Draft, Want
from paceline.verify.tree import PREFILL_ROWS, pack
from tests.models.test_families import assert_close, check_drafts, expected, feed, text

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "vocab_size_per_layer_input": 101,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "intermediate_size": 80,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 16,
    "max_position_embeddings": 2048,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "initializer_range": 0.2,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
CASES: dict[str, dict[str, Any]] = {
    "small": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "large": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {"hidden_size_per_layer_input": 0, **EXPERTS},
    "all at once": {"num_kv_shared_layers": 3, "attention_k_eq_v": True, "num_global_key_value_heads": 1, **EXPERTS},
}


def tiny(case: str, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' model."""
    torch.manual_seed(0)
    theirs = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, **CASES[case]}))
    theirs.config._experts_implementation = "eager"
    for key, tensor in theirs.state_dict().items():  # transformers starts norms and factors at 1
        if tensor.dim() == 1:
            torch.nn.init.normal_(tensor, 1.0, 0.1 if key.endswith("layer_scalar") else 0.3)
    return theirs.to(dtype).eval()


@cache
def models(case: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Decoder]:
    """transformers' model, and ours from what it saves."""
    theirs = tiny(case, dtype)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        read = read_config(json.loads((Path(folder) / "config.json").read_text()))
        tensors = translated({"model_type": read.family}, load_file(Path(folder) / "model.safetensors"))
        return theirs, Decoder(read, tensors, dtype, CPU)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    theirs, ours = models(case)
    tokens = text(70)
    cache = ours.new_cache()
    slot = cache.acquire(70)
    logits = [feed(ours, cache, slot, tokens[a:b]) for a, b in ((0, 33), (33, 35), (35, 55))]
    for token in tokens[55:]:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], CPU)
        logits.append(ours.forward(rows, cache, Want()).logits[0, :1])
        cache.commit(rows, [()])
    assert_close(torch.cat(logits), expected(theirs, tokens))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [47, 48])
def test_a_drafted_nodes_logits_are_those_of_its_path(case: str, length: int) -> None:
    theirs, ours = models(case)
    tokens = text(length)
    cache = ours.new_cache()
    slot = cache.acquire(length)
    feed(ours, cache, slot, tokens)
    check_drafts(theirs, ours, cache, slot, tokens, rows=(2, 5, 7, 8))


@pytest.mark.parametrize("case", CASES)
def test_windows_hold_over_a_ring_that_has_wrapped(case: str) -> None:
    theirs, ours = models(case)
    tokens = text(1110)
    cache = ours.new_cache()
    slot = cache.acquire()
    parts = [feed(ours, cache, slot, tokens[start : start + PREFILL_ROWS]) for start in range(0, 1110, PREFILL_ROWS)]
    assert_close(torch.cat(parts), expected(theirs, tokens))
    check_drafts(theirs, ours, cache, slot, tokens, rows=(8,))


@pytest.mark.parametrize("case", CASES)
def test_the_cache_holds_keys_of_the_layers_that_have_some(case: str) -> None:
    _, ours = models(case)
    cache = ours.new_cache()
    slot = cache.acquire()
    while cache.lengths[slot] < 1024:  # where no doubling is half used
        feed(ours, cache, slot, [1] * PREFILL_ROWS)
    assert ours.config.cache_bytes(1024, itemsize=8) == cache.nbytes


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_keeps_bits_whatever_travels_along(case: str) -> None:
    assert guarantee(models(case, torch.bfloat16)[1]) == "bits"
