"""Tiny random models of every family: logits of golden files and of transformers, plainly, in drafts, past windows."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.model import DraftModel
from paceline.engine.self_check import guarantee
from paceline.kernels.linear import gated, linear, packs_bfloat16
from paceline.models.config import Groups
from paceline.models.layers import Dense, Mixture
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, run
from paceline.types import DraftBudget
from paceline.verify.tree import PREFILL_ROWS
from tests.support.cover import some
from tests.support.golden import ROUNDED, check_golden, decoder, made, models, read
from tests.support.logits import (
    assert_close,
    check_chunks,
    check_path,
    check_ring,
    expected,
    feed,
    relative_error,
    text,
)
from tests.support.tiny_families import CASES, FAMILIES, VOCAB, WINDOWED

STRUCTURES = [
    *("qwen3 with biases, sliding upper layers", "phi3, long factors", "smollm3", "gemma2", "gemma3, stretched"),
    *("mixtral", "gpt-oss", "qwen3 moe, sliding", "granite", "olmo3, sliding", "exaone4", "glm4", "glm4.5"),
    *("llama4, sliding", "llama4, dense", "deepseek v2", "deepseek v3", "cohere, norms of heads", "starcoder2"),
    *("stablelm, parallel", "phi", "gpt-neox", "yarn", "hunyuan"),
]
"""Cases with every kind of layer, norm, mask and rotation."""


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_the_golden_ones_in_chunks_and_token_by_token(case: str) -> None:
    check_golden(case, (33, 35, 65), end=70)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_golden_file_is_what_transformers_computes(case: str) -> None:
    stored, live = read(case), made(case)
    again = "write it again: python -m tests.support.golden"
    assert (live.config, live.shapes, live.text) == (stored.config, stored.shapes, stored.text), again
    assert live.logits.keys() == stored.logits.keys(), again
    for position, row in live.logits.items():
        assert_close(torch.tensor(stored.logits[position]), torch.tensor(row))
    assert (live.bfloat16 or 0.0) == pytest.approx(stored.bfloat16 or 0.0, rel=0.05), again


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_equal_transformers_in_chunks_and_token_by_token(case: str) -> None:
    check_chunks(*models(case), 70, (33, 35, 55))


@some("case", FAMILIES, fast=STRUCTURES)
def test_a_drafted_nodes_logits_equal_its_path_fed_plainly(case: str) -> None:
    check_path(decoder(case), decoder(case), 47)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("length", [47, 48])
def test_a_drafted_nodes_logits_equal_its_path(case: str, length: int) -> None:
    check_path(*models(case), length)


@some("case", WINDOWED, fast=["gemma2", "gemma3, stretched", "mistral, sliding", "llama4, sliding", "cohere2, sliding"])
def test_logits_are_the_golden_ones_over_a_ring_that_has_wrapped(case: str) -> None:
    check_golden(case, (*range(PREFILL_ROWS, 1110, PREFILL_ROWS), 1107))


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOWED)
def test_windows_hold_over_a_ring_that_has_wrapped(case: str) -> None:
    check_ring(*models(case))


def test_drafts_hold_over_a_ring_that_has_wrapped() -> None:
    check_ring(decoder("mistral, sliding"), decoder("mistral, sliding"))


TEXTS = [
    *("gemma3", "mixtral", "qwen3 moe", "gpt-oss", "phi3, sliding", "phi3, long factors"),
    *("cohere2, sliding", "starcoder2", "stablelm, parallel", "phi", "gpt-neox", "glm4.5", "llama4, sliding"),
]
SHAPES = (DraftBudget.chain(4), DraftBudget(9, 4, 3))


@some("case", TEXTS, fast=["gemma3", "mixtral", "phi3, long factors", "stablelm, parallel", "llama4, sliding"])
def test_text_with_drafts_is_the_text_without(case: str) -> None:
    prompt, how = text(34), Sampling(max_new_tokens=40)
    plain = run(decoder(case), prompt, how)[0]
    for shape in SHAPES:
        assert run(decoder(case), prompt, how, Oracle([*prompt, *plain], 0.7, VOCAB), shape)[0] == plain


@pytest.mark.slow
@pytest.mark.parametrize("case", TEXTS)
def test_text_with_drafts_is_what_transformers_generates(case: str) -> None:
    theirs, ours = models(case)
    prompt = text(34)
    whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
    for shape in SHAPES:
        drafter = Oracle(whole, 0.7, VOCAB)
        assert run(ours, prompt, Sampling(max_new_tokens=40), drafter, shape)[0] == whole[34:]


def test_a_draft_model_keeps_to_the_factors_of_its_request() -> None:
    ours = decoder("phi3, long factors")
    stats = run(ours, text(34), Sampling(max_new_tokens=30), DraftModel(ours, VOCAB), DraftBudget.chain(3))[2]
    assert stats.acceptance == 1.0, "it drafts for itself"


def test_a_text_keeps_the_factors_that_its_prompt_chose() -> None:
    ours = decoder("phi3, long factors")
    tokens = text(40)
    logits = {}
    for prompt in (30, 31):
        cache = ours.new_cache()
        first = cache.acquire(prompt)
        feed(ours, cache, first, tokens[:20])
        for slot in (first, cache.fork(first)):
            logits[prompt, slot] = feed(ours, cache, slot, tokens[20:])
    assert torch.equal(logits[30, 0], logits[30, 1]), "a fork goes on with them"
    assert torch.equal(logits[31, 0], logits[31, 1])
    assert not torch.allclose(logits[30, 0][:5], logits[31, 0][:5]), "another prompt, another choice"
    assert_close(logits[31, 0], expected(decoder("phi3, long factors"), tokens)[20:])
    cache.release(first)
    assert cache.prompts[cache.acquire()] == 0


def test_dynamic_scaling_follows_the_prompt() -> None:
    check_golden("dynamic", (20, 65))
    assert decoder("dynamic").context_length == 120


@pytest.mark.slow
def test_dynamic_scaling_equals_transformers() -> None:
    theirs, ours = models("dynamic")
    for length in (70, 90, 39):  # transformers keeps the base of the longest text it has seen, and resets below 40
        tokens = text(length)
        cache = ours.new_cache()
        slot = cache.acquire(length)
        logits = torch.cat([feed(ours, cache, slot, tokens[:20]), feed(ours, cache, slot, tokens[20:])])
        assert_close(logits, expected(theirs, tokens))


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "mistral, sliding", "qwen2, sliding upper layers"])
def test_the_cache_holds_what_the_config_says(case: str) -> None:
    ours = decoder(case)
    cache = ours.new_cache()
    slot = cache.acquire()
    for length in (256, 512, 1024):  # where no step is half used
        while cache.lengths[slot] < length:
            feed(ours, cache, slot, [1] * PREFILL_ROWS)
        assert ours.config.cache_bytes(length, torch.float64) == cache.nbytes


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_rounds_no_worse_than_transformers(case: str) -> None:
    error = relative_error(expected(decoder(case, torch.bfloat16), text(60)), expected(decoder(case), text(60)))
    assert error < 1.05 * (read(case).bfloat16 or 0)


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@some("case", FAMILIES, fast=STRUCTURES)
def test_bfloat16_keeps_bits_whatever_travels_along(case: str) -> None:
    assert guarantee(decoder(case, torch.bfloat16)) == "bits"


class Watched(Dense):
    """An expert that records the number of rows of its products."""

    def __init__(self, number: int, seen: list[tuple[int, int]]) -> None:
        make = torch.Generator().manual_seed(number)
        gate, up = (torch.randn(8, 6, generator=make) for _ in range(2))
        super().__init__(gated(torch.cat([gate, up]), None, "silu"), linear(torch.randn(6, 8, generator=make)))
        self.number, self.seen = number, seen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.number, len(x)))
        return super().__call__(x)


def mixture(router: torch.Tensor) -> tuple[Mixture, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    return Mixture(linear(router), [Watched(i, seen) for i in range(5)], used=2, normalised=False), seen


def test_an_expert_never_multiplies_fewer_than_four_rows() -> None:
    experts, seen = mixture(torch.randn(5, 6, generator=torch.Generator().manual_seed(9)))
    x = torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(3))
    whole = experts(x)
    assert min(rows for _, rows in seen) == 4
    for row in range(7):  # alone, three rows of padding and all
        torch.testing.assert_close(experts(x[:, row : row + 1])[0, 0], whole[0, row])


def test_experts_of_equal_score_are_taken_in_order() -> None:
    experts, seen = mixture(torch.zeros(5, 6))
    experts(torch.ones(1, 4, 6))
    assert [number for number, _ in seen] == [0, 1]


@pytest.mark.parametrize(("best", "chosen"), [(2, [4, 5]), (1, [0, 1])])
def test_only_experts_of_the_best_groups(best: int, chosen: list[int]) -> None:
    """Groups are ranked by their two highest scores (DeepSeek-V3) or their highest score (V2). Ties go to the first."""
    logits = torch.tensor([[3.0], [-2.0], [0.0], [0.0], [2.0], [1.9], [2.0], [1.9]])
    one = Mixture(linear(logits), [], 2, False, sigmoid=True, groups=Groups(4, 1, best))
    assert one._route(torch.ones(3, 1))[1].tolist() == [chosen] * 3
