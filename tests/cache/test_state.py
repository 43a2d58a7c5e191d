"""Rollback of states: after any draft, a text continues from the state after the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.cache.state import CHECKPOINT_INTERVAL, StateCache, Tree, max_states
from paceline.errors import CacheError
from paceline.models.decoder import Decoder
from paceline.models.mamba import Selective
from paceline.models.recurrent import DeltaRule, MatrixState
from paceline.protocols import KVCache
from paceline.types import Draft, Want
from paceline.verify.tree import chunk_end, pack, pack_prefix
from tests.support.broken_states import Forgets, Kept, Sibling, Twice, broken
from tests.support.hybrids import DELTA, text, tiny_hybrid, tiny_mamba
from tests.support.target_clauses import check_clause, clauses

TARGET = tiny_hybrid()
CPU = torch.device("cpu")
TREE = Draft((5, 6, 7, 8, 9), (0, 0, 1, 2, 4))


HYBRIDS: dict[str, Callable[..., Decoder]] = {"delta": tiny_hybrid, "mamba": tiny_mamba}


@clauses(delta="traces commits truncation", mamba="drafts forks growing")
def test_a_hybrid_keeps_the_contract_of_a_target(kind: str, clause: str) -> None:
    check_clause(clause, HYBRIDS[kind], tolerance=1e-9, taps=(1, "final"))


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("kind", [Kept, Twice, Sibling])
def test_the_check_notices_a_state_that_is_not_rolled_back(kind: type[StateCache], hybrid: str) -> None:
    with pytest.raises(AssertionError, match="the logits differ from plain feeding"):
        check_clause("commits", lambda: broken(kind, hybrid=HYBRIDS[hybrid]), tolerance=1e-9)


def fed(tokens: Sequence[int], target: Any = TARGET) -> tuple[KVCache, int]:
    cache = target.new_cache()
    return cache, feed(cache, cache.acquire(), tokens, target)


def feed(cache: KVCache, slot: int, tokens: Sequence[int], target: Any = TARGET) -> int:
    """Feed the tokens that are missing in the slot."""
    while (done := cache.lengths[slot]) < len(tokens):
        chunk = tokens[done : chunk_end(done)]
        rows = pack_prefix(chunk, slot, done, CPU)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(chunk))])
    return slot


def logits(cache: KVCache, slot: int, draft: Draft = Draft(), target: Any = TARGET) -> torch.Tensor:  # noqa: B008
    rows = pack([3], [draft], [slot], [cache.lengths[slot]], CPU)
    out: torch.Tensor = target.forward(rows, cache, Want()).logits[0]
    return out


def test_an_uncommitted_pass_leaves_no_trace() -> None:
    cache, slot = fed(text(20))
    before = logits(cache, slot)
    for draft in (TREE, Draft.chain([1, 2, 3])):
        logits(cache, slot, draft)
    assert torch.equal(logits(cache, slot), before)


def test_a_round_can_be_repeated_after_its_commit() -> None:
    cache, slot = fed(text(20))
    for _ in range(2):
        rows = pack([3], [Draft.chain([6, 8, 9])], [slot], [20], CPU)
        TARGET.forward(rows, cache, Want())
        cache.commit(rows, [(1, 2)])
    states = cache._states[slot]
    with pytest.raises(CacheError, match="once"):
        cache.commit(rows, [(1, 2, 3)])
    assert cache._states[slot] is states
    again, other = fed([*text(20), 3, 6, 8])
    torch.testing.assert_close(logits(cache, slot), logits(again, other))


def test_the_state_after_a_draft_has_the_bits_of_its_tokens_fed_without_the_draft() -> None:
    cache, slot = fed(text(CHECKPOINT_INTERVAL - 2))
    alone = cache.fork(slot)
    for token in (3, 6, 8, 9):
        rows = pack([token], [Draft()], [alone], [cache.lengths[alone]], CPU)
        TARGET.forward(rows, cache, Want())
        cache.commit(rows, [()])
    rows = pack([3], [TREE], [slot], [CHECKPOINT_INTERVAL - 2], CPU)
    TARGET.forward(rows, cache, Want())
    cache.commit(rows, [(2, 4, 5)])
    ours, theirs = cache.save(slot), cache.save(alone)
    assert sorted(ours.states) == [CHECKPOINT_INTERVAL, CHECKPOINT_INTERVAL + 2], "the draft went past a checkpoint"  # type: ignore[attr-defined]
    # In float64, products differ in the last bits, because no kernels keep them. The states do not differ.
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_slot_goes_back_to_the_nearest_checkpoint() -> None:
    tokens = text(1100)
    cache, slot = fed(tokens)
    for goal, kept in ((1100, 1100), (1090, 1024), (1000, 768), (700, 512), (300, 256), (200, 0)):
        cache.truncate(slot, goal)
        assert cache.lengths[slot] == kept
        feed(cache, slot, tokens[:goal])
        other, whole = fed(tokens[:goal])
        torch.testing.assert_close(logits(cache, slot), logits(other, whole))
    cache, slot = fed(tokens[:300])
    feed(cache, slot, tokens[:310])
    cache.truncate(slot, 300)  # the length before the latest commit
    assert cache.lengths[slot] == 300


def test_checkpoints_within_a_pass_store_their_own_states() -> None:
    """Feed rows past a checkpoint, and return a slot to it. There is a negative control."""
    for kind, right in ((StateCache, True), (Forgets, False)):
        target = broken(kind)
        cache, slot = fed(text(CHECKPOINT_INTERVAL - 2), target)
        rows = pack([3], [Draft.chain([4, 5, 6])], [slot], [CHECKPOINT_INTERVAL - 2], CPU)
        target.forward(rows, cache, Want())
        cache.commit(rows, [(1, 2, 3)])
        cache.truncate(slot, CHECKPOINT_INTERVAL)
        other, whole = fed([*text(CHECKPOINT_INTERVAL - 2), 3, 4])
        assert torch.allclose(logits(cache, slot, target=target), logits(other, whole)) is right


def test_a_prompts_chunk_is_committed_whole() -> None:
    cache = TARGET.new_cache()
    slot = cache.acquire()
    rows = pack_prefix(text(20), slot, 0, CPU)
    TARGET.forward(rows, cache, Want("none"))
    with pytest.raises(ValueError, match="whole"):
        cache.commit(rows, [(1, 2)])


def rules() -> dict[str, MatrixState]:
    delta, mamba = TARGET._stack._recurrences[0], tiny_mamba()._stack._recurrences[1]
    assert isinstance(delta, DeltaRule)
    assert isinstance(mamba, Selective)
    return {"delta": delta, "tiled": DeltaRule(replace(DELTA, tiled=True), delta.convolution), "mamba": mamba}


@pytest.mark.parametrize("name", ["delta", "tiled", "mamba"])
def test_a_prompt_taken_in_chunks_is_a_prompt_taken_one_by_one(name: str) -> None:
    rule = rules()[name]
    draw, c = torch.Generator().manual_seed(0), rule.config
    entries, gates = (torch.randn(150, n, generator=draw).double() for n in (c.channels, c.heads))
    inputs = (entries, -gates.abs(), gates.sigmoid())
    tree = Tree(tuple(range(-1, 149)))
    fast, _, end = rule.scan(rule.empty(), None, tree, inputs, True)
    slow, updates, last = rule.scan(rule.empty(), None, tree, inputs, False)
    torch.testing.assert_close(fast, slow)
    assert end
    assert last
    torch.testing.assert_close(end, last)
    for one, other in zip(rule.apply(rule.empty(), updates, range(150)), last, strict=True):
        assert torch.equal(one, other), "a commit has the bits of the pass"


@pytest.mark.parametrize("length", [1, 255, 256, 300, 512, 1100])
def test_a_slot_keeps_at_most_the_counted_states(length: int) -> None:
    cache, slot = fed(text(length))
    logits(cache, slot)
    rows = pack([3], [Draft()], [slot], [length], CPU)
    TARGET.forward(rows, cache, Want())
    cache.commit(rows, [()])
    states = cache._states[slot]  # type: ignore[attr-defined]
    assert len(states) <= max_states(length + 1)
