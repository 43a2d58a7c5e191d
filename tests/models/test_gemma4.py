"""Gemma 4 on tiny random models: logits of golden files and of transformers, adapters, drafters."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.early_exit import EarlyExit
from paceline.engine.self_check import guarantee
from paceline.kernels.cpu.build import library
from paceline.kernels.linear import packs_bfloat16
from paceline.kernels.low_rank import Factors
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run
from paceline.types import DraftBudget
from paceline.verify.tree import PREFILL_ROWS
from tests.support.cover import some
from tests.support.golden import check_golden, decoder, models, read, tensors_of
from tests.support.logits import CPU, assert_close, check_chunks, check_path, check_ring, chunks_and_tokens, feed, text
from tests.support.tiny_families import GEMMA4, VOCAB


@pytest.mark.parametrize("case", GEMMA4)
def test_logits_are_the_golden_ones_in_chunks_and_token_by_token(case: str) -> None:
    check_golden(case, (33, 35, 65), end=70)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("case", ["gemma4, small", "gemma4, large"])
def test_one_call_of_the_kernels_runs_the_dense_layers(case: str) -> None:
    ours, golden = decoder(case, torch.float32), read(case)
    assert ours.runs_natively
    logits = chunks_and_tokens(ours, golden.text[:70], (33, 35, 65))
    at = [position for position in golden.logits if position < 70]
    expected = torch.tensor([golden.logits[position] for position in at])
    assert float((logits[at] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", GEMMA4)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    check_chunks(*models(case), 70, (33, 35, 55))


@pytest.mark.parametrize("case", GEMMA4)
def test_a_drafted_nodes_logits_equal_its_path_fed_plainly(case: str) -> None:
    check_path(decoder(case), decoder(case), 48)


@pytest.mark.slow
@pytest.mark.parametrize("case", GEMMA4)
@pytest.mark.parametrize("length", [47, 48])
def test_a_drafted_nodes_logits_equal_its_path(case: str, length: int) -> None:
    check_path(*models(case), length)


@some("case", GEMMA4, fast=["gemma4, small", "gemma4, large"])
def test_logits_are_the_golden_ones_over_a_ring_that_has_wrapped(case: str) -> None:
    check_golden(case, (*range(PREFILL_ROWS, 1110, PREFILL_ROWS), 1107))


@pytest.mark.slow
@pytest.mark.parametrize("case", GEMMA4)
def test_windows_hold_over_a_ring_that_has_wrapped(case: str) -> None:
    check_ring(*models(case))


@some("case", GEMMA4, fast=["gemma4, small", "gemma4, large"])
def test_the_cache_holds_keys_of_the_layers_that_have_some(case: str) -> None:
    ours = decoder(case)
    cache = ours.new_cache()
    slot = cache.acquire()
    while cache.lengths[slot] < 1024:  # where no step is half used
        feed(ours, cache, slot, [1] * PREFILL_ROWS)
    assert ours.config.cache_bytes(1024, torch.float64) == cache.nbytes


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@pytest.mark.parametrize("case", GEMMA4)
def test_bfloat16_keeps_bits_whatever_travels_along(case: str) -> None:
    assert guarantee(decoder(case, torch.bfloat16)) == "bits"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma4, small", "gemma4, all at once"])
def test_greedy_text_is_what_transformers_generates(case: str) -> None:
    theirs, ours = models(case)
    whole = theirs.generate(torch.tensor([text(34)]), max_new_tokens=40, do_sample=False)[0].tolist()
    assert run(ours, text(34), Sampling(max_new_tokens=40))[0] == whole[34:]


@some("shape", {"chain": DraftBudget.chain(4), "tree": DraftBudget(9, 4, 3)}, fast=["tree"])
@some("case", ["gemma4, small", "gemma4, all at once"], fast=["gemma4, small"])
@some("temperature", [0.0, 0.8], fast=["0.8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_text_is_the_same_with_drafters(
    case: str, temperature: float, shape: DraftBudget, dtype: torch.dtype
) -> None:
    """Early exit ends within the layers that share keys, and verification continues there."""
    ours, prompt, how = decoder(case, dtype), text(34), Sampling(max_new_tokens=40, temperature=temperature, seed=2)
    plain = run(ours, prompt, how)[0]
    early = EarlyExit(ExitConfig(48, 5), {}, ours, threshold=0.0)
    for drafter in (Oracle([*prompt, *plain], 0.7, VOCAB), early):
        drafted = run(ours, prompt, how, drafter, shape)
        assert drafted[0] == plain
        assert drafted[2].drafted


ADAPTED = (
    *("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
)


@pytest.mark.parametrize("case", ["gemma4, small", "gemma4, large"])
def test_an_adapter_that_is_not_merged_equals_the_merged_adapter(case: str) -> None:
    """This includes the per-token inputs of layers."""
    ours, tokens, draw = decoder(case), text(20), torch.Generator().manual_seed(1)
    tensors = {name: x.double() for name, x in tensors_of(read(case)).items()}
    factors = {}
    for name, x in tensors.items():
        if name.removesuffix(".weight").endswith(ADAPTED):
            shapes = ((3, x.shape[1]), (x.shape[0], 3))
            a, b = (torch.randn(shape, generator=draw, dtype=torch.float64) * 0.3 for shape in shapes)
            factors[name.removesuffix(".weight")] = a, b
            tensors[name] = x + b @ a
    assert {name.rpartition(".")[2] for name in factors} >= set(ADAPTED[: 8 if case == "gemma4, small" else 5])
    adapted = Decoder(ours.config, tensors_of(read(case)), torch.float64, CPU, adapters=[Factors("x", factors)])
    merged = Decoder(ours.config, tensors, torch.float64, CPU)
    rows = []
    for model, number in ((ours, 0), (adapted, 1), (merged, 0)):
        cache = model.new_cache()
        rows.append(feed(model, cache, cache.acquire(20, number), tokens))
    plain, beside, whole = rows
    assert_close(beside, whole)
    assert float((beside - plain).abs().max()) > 1e-2
