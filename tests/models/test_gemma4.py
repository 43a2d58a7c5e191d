"""Gemma 4 against transformers, on tiny random models read back from disk."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.early_exit import EarlyExit
from paceline.engine.self_check import guarantee
from paceline.kernels.linear import packs_bfloat16
from paceline.kernels.low_rank import Factors
from paceline.models.decoder import Decoder
from paceline.models.families import read_config
from paceline.models.heads import ExitConfig
from paceline.models.tensor_names import translated
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run
from paceline.types import DraftBudget
from paceline.verify.tree import PREFILL_ROWS
from tests.models.test_families import assert_close, check_chunks, check_drafts, expected, feed, text

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


def tensors_of(case: str) -> Mapping[str, torch.Tensor]:
    """The tensors that transformers' model saves, under the names of ours."""
    with tempfile.TemporaryDirectory() as folder:
        tiny(case).save_pretrained(folder)
        read = read_config(json.loads((Path(folder) / "config.json").read_text()))
        return translated({"model_type": read.family}, load_file(Path(folder) / "model.safetensors"))


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
    check_chunks(*models(case), 70, (33, 35, 55))


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
    while cache.lengths[slot] < 1024:  # where no step is half used
        feed(ours, cache, slot, [1] * PREFILL_ROWS)
    assert ours.config.cache_bytes(1024, itemsize=8) == cache.nbytes


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_keeps_bits_whatever_travels_along(case: str) -> None:
    assert guarantee(models(case, torch.bfloat16)[1]) == "bits"


@pytest.mark.parametrize("case", ["small", "all at once"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_drafters(case: str, temperature: float) -> None:
    """Early exit ends among the layers that share keys, and verification goes on from there."""
    theirs, ours = models(case)
    prompt, how = text(34), Sampling(max_new_tokens=40, temperature=temperature, seed=2)
    plain = run(ours, prompt, how)[0]
    if not temperature:
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
        assert plain == whole[34:]
    for shape in (DraftBudget.chain(4), DraftBudget(9, 4, 3)):
        early = EarlyExit(ExitConfig(48, 5), {}, ours, threshold=0.0)
        for drafter in (Oracle([*prompt, *plain], 0.7, 101), early):
            drafted = run(ours, prompt, how, drafter, shape)
            assert drafted[0] == plain
            assert drafted[2].drafted


ADAPTED = (
    *("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
)


@pytest.mark.parametrize("case", ["small", "large"])
def test_an_adapter_beside_the_weights_is_the_merged_one(case: str) -> None:
    """In the inputs that layers get by the token itself too."""
    ours, tokens, draw = models(case)[1], text(20), torch.Generator().manual_seed(1)
    tensors = {name: x.double() for name, x in tensors_of(case).items()}
    factors = {}
    for name, x in tensors.items():
        if name.removesuffix(".weight").endswith(ADAPTED):
            shapes = ((3, x.shape[1]), (x.shape[0], 3))
            a, b = (torch.randn(shape, generator=draw, dtype=torch.float64) * 0.3 for shape in shapes)
            factors[name.removesuffix(".weight")] = a, b
            tensors[name] = x + b @ a
    assert {name.rpartition(".")[2] for name in factors} >= set(ADAPTED[: 8 if case == "small" else 5])
    adapted = Decoder(ours.config, tensors_of(case), torch.float64, CPU, adapters=[Factors("x", factors)])
    merged = Decoder(ours.config, tensors, torch.float64, CPU)
    rows = []
    for model, number in ((ours, 0), (adapted, 1), (merged, 0)):
        cache = model.new_cache()
        rows.append(feed(model, cache, cache.acquire(20, number), tokens))
    plain, beside, whole = rows
    assert_close(beside, whole)
    assert float((beside - plain).abs().max()) > 1e-2
