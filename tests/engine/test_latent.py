"""Latent attention: its cache, and the same text with its MTP layer (more in `test_mixtures.py`)."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoints.head_files import open_head
from paceline.drafters.eagle import Eagle
from paceline.engine.engine import Engine
from paceline.models.cuda_decoder import DeviceDecoder
from paceline.models.decoder import Decoder
from paceline.models.heads import EagleConfig
from paceline.testing import run_together
from paceline.types import DraftBudget
from tests.support.cover import some
from tests.support.golden import decoder, read, tensors_of
from tests.support.logits import check_drafts, feed, text
from tests.support.mixtures import CHAIN, PROMPTS, SAMPLINGS, TREE, plain
from tests.support.mtp_reference import Reference


def v3() -> Decoder:
    return decoder("deepseek v3")


@some("shape", {"chain": CHAIN, "tree": TREE}, fast=["tree"])
def test_the_text_does_not_depend_on_its_mtp_layer(shape: DraftBudget, tmp_path: Path) -> None:
    head = open_head(Reference("deepseek v3").save(tmp_path))
    assert isinstance(head.config, EagleConfig)
    replies = run_together(Engine(v3(), Eagle(head.config, head.tensors, v3()), shape), PROMPTS, SAMPLINGS)
    assert [reply[0] for reply in replies] == plain(v3())
    assert sum(stats.drafted for _, _, stats in replies) > 0


def test_the_cache_holds_one_row_by_token() -> None:
    """Each of 4 layers stores 28 numbers. Keys and values of 6 heads would be 180 numbers."""
    target = v3()
    cache = target.new_cache()
    slot = cache.acquire()
    feed(target, cache, slot, text(256))
    assert cache.nbytes == 4 * 256 * 28 * 8 == target.config.cache_bytes(256, torch.float64)
    (slab,) = cache.slabs
    assert [x.shape for x in slab.tensors] == [(4, 1, 1, 256, 28)]
    saved = cache.save(slot)
    assert sum(x.numel() for x in saved.tensors) == 4 * 256 * 28


def test_the_cache_of_a_device_holds_one_tensor_too() -> None:
    tensors, tokens = tensors_of(read("deepseek v3")), text(47)
    target = DeviceDecoder(v3().config, tensors, torch.float64, torch.device("cpu"), capture=None)
    cache = target.new_cache()
    slot = cache.acquire(len(tokens))
    feed(target, cache, slot, tokens)
    assert {len(slab.tensors) for slab in cache.slabs} == {1}
    check_drafts(v3(), target, cache, slot, tokens, rows=(2, 5, 7, 8))
