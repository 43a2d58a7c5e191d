"""Latent attention: the same text with drafters, in batches, from cached prefixes and after roll-backs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.head_files import open_head
from paceline.drafters.base import Drafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.kernels.cpu.build import library
from paceline.models.cuda_decoder import DeviceDecoder
from paceline.models.heads import EagleConfig
from paceline.models.tensor_names import translated
from paceline.sampling.parameters import Sampling
from paceline.session import Session
from paceline.testing import run, run_together
from paceline.types import Draft, DraftBudget
from tests.models.test_families import check_drafts, feed, models, text
from tests.mtp_reference import Reference

CHAIN, TREE = DraftBudget.chain(4), DraftBudget(8, 4, 3)
V3, V2 = models("deepseek v3")[1], models("deepseek v2")[1]
SAMPLINGS = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=0.9, seed=3)]
PROMPTS = [text(40), text(70)[30:]]


@cache
def plain() -> list[list[int]]:
    return [run(V3, prompt, sampling)[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_text_does_not_depend_on_the_drafter(shape: DraftBudget, tmp_path: Path) -> None:
    head = open_head(Reference("deepseek v3").save(tmp_path))
    assert isinstance(head.config, EagleConfig)
    itself = DraftModel(V3, 101)
    drafters: list[Drafter] = [NGram(), DraftModel(V2, 101), itself, Eagle(head.config, head.tensors, V3)]
    for drafter in drafters:
        replies = run_together(Engine(V3, drafter, shape), PROMPTS, SAMPLINGS)
        assert [reply[0] for reply in replies] == plain()
        assert sum(stats.drafted for _, _, stats in replies) > 0
        if drafter is itself and shape is CHAIN:
            assert all(stats.acceptance == 1.0 for _, _, stats in replies)


def test_prompts_begin_where_earlier_texts_were_the_same() -> None:
    engine = Engine(V3, NGram(), CHAIN)
    engine.remember(1 << 26)
    short = Sampling(max_new_tokens=8, temperature=0.7, seed=1)
    run(V3, text(400), short, engine=engine)
    prompt = text(400)[:300] + PROMPTS[1]
    reply, _, stats = run(V3, prompt, short, engine=engine)
    assert stats.cached >= 256
    assert reply == run(V3, prompt, short)[0]


def test_sessions_roll_back_to_any_token() -> None:
    session, tokens = Session(V3, (), lambda *a, **b: [], lambda ids: ""), text(60)
    session.observe(tokens)
    session.logits_after([1, 2, 3])
    session.observe([1, 2, 9])
    for length in (61, 20, 3):
        session.rollback_to(length)
        session.observe([5])
        again = Session(V3, (), lambda *a, **b: [], lambda ids: "")
        again.observe([*(*tokens, 1, 2, 9)[:length], 5])
        tree = Draft((4, 5, 6), (0, 0, 1))
        torch.testing.assert_close(session.tree_logits(tree), again.tree_logits(tree))


def test_the_cache_holds_one_row_by_token() -> None:
    """28 numbers in each of 4 layers, where keys and values of 6 heads would be 180."""
    cache = V3.new_cache()
    slot = cache.acquire()
    feed(V3, cache, slot, text(256))
    assert cache.nbytes == 4 * 256 * 28 * 8 == V3.config.cache_bytes(256, itemsize=8)
    (slab,) = cache.slabs
    assert [x.shape for x in slab.tensors] == [(4, 1, 1, 256, 28)]
    saved = cache.save(slot)
    assert sum(x.numel() for x in saved.tensors) == 4 * 256 * 28


def test_the_cache_of_a_device_holds_one_tensor_too() -> None:
    theirs, ours = models("deepseek v3")
    tensors, tokens = translated({"model_type": "deepseek_v3"}, theirs.state_dict()), text(47)
    target = DeviceDecoder(ours.config, tensors, torch.float64, torch.device("cpu"), capture=None)
    cache = target.new_cache()
    slot = cache.acquire(len(tokens))
    feed(target, cache, slot, tokens)
    assert {len(slab.tensors) for slab in cache.slabs} == {1}
    check_drafts(theirs, target, cache, slot, tokens, rows=(2, 5, 7, 8))


@pytest.mark.skipif(library() is None, reason="no bfloat16 products that keep bits")
def test_bfloat16_keeps_bits() -> None:
    target = models("deepseek v3", torch.bfloat16)[1]
    assert guarantee(target) == "bits"
    alone = [run(target, prompt, sampling)[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    for shape in (CHAIN, TREE):
        replies = run_together(Engine(target, DraftModel(V2, 101), shape), PROMPTS, SAMPLINGS)
        assert [reply[0] for reply in replies] == alone
