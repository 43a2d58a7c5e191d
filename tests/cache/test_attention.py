"""The cache's attention compared with the plain formula over everything that was written."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from paceline.cache.attention import BLOCK
from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.kernels.cpu.build import library
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import depths, pack, pack_prefix
from tests.support.cache_witness import CPU, HEADS, KV, LAYERS, D, Witness, random_tree, some_path

SLOTS = pytest.mark.parametrize("kind", [SlabCache, SharedSlabCache])
needs_kernels = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("kind", [SlabCache, pytest.param(SharedSlabCache, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("computed", ["by torch", pytest.param("by kernels", marks=needs_kernels)])
def test_rows_see_the_right_rows_at_any_text_length(kind: type[SlabCache], seed: int, computed: str) -> None:
    """Run prefill, trees and commits at lengths around windows, blocks and the ring buffer sizes (1024 and 1536)."""
    rng, kernel = random.Random(seed), computed == "by kernels"
    witness = Witness(seed, torch.float32 if kernel else torch.float64, kind, kernel=kernel)
    slot = witness.acquire()
    length = 0
    for goal in (15, 40, 500, 520, 1015, 1040, 1500, 1545, 2060, 3080):
        while length < goal:
            count = min(256, goal - length)
            witness.feed(pack_prefix([0] * count, slot, length, CPU), [list(range(1, count))])
            length += count
        for _ in range(2):
            fits = witness.cache.fit(slot, DraftBudget(9, 9, 3))
            draft = random_tree(rng, fits.nodes)
            path = some_path(rng, draft)
            witness.feed(pack([0], [draft], [slot], [length], CPU), [path])
            length += 1 + len(path)
    assert witness.cache.lengths[slot] == length
    capacities = sorted(slab.capacity for slab in witness.cache.slabs)
    assert capacities[:3] == [1024, 1024, 1536], "rings do not grow"


@needs_kernels
def test_a_released_slot_frees_its_memory_at_once() -> None:
    witness = Witness(dtype=torch.float32, kernel=True)
    slot = witness.acquire()
    gc.disable()
    try:
        witness.feed(pack_prefix([0] * 9, slot, 0, CPU), [list(range(1, 9))])
        keys = weakref.ref(witness.cache.slabs[0].tensors[0])
        witness.cache.release(slot)
        assert keys() is None
    finally:
        gc.enable()


@SLOTS
def test_slots_with_any_length_share_a_pass_and_end_in_any_order(kind: type[SlabCache]) -> None:
    rng, witness = random.Random(1), Witness(1, kind=kind)
    slots = [witness.acquire() for _ in range(5)]
    for slot, length in zip(slots, (3, 30, 700, 1030, 8), strict=True):
        done = 0
        while done < length:
            count = min(256, length - done)
            witness.feed(pack_prefix([0] * count, slot, done, CPU), [list(range(1, count))])
            done += count
    for leaving in (1, 4, 0, None):
        rng.shuffle(slots)
        drafts = [random_tree(rng, 5) for _ in slots]
        lengths = [witness.cache.lengths[s] for s in slots]
        paths = [some_path(rng, draft) for draft in drafts]
        witness.feed(pack([0] * len(slots), drafts, slots, lengths, CPU), paths)
        if leaving is not None:
            witness.cache.release(slots.pop(min(leaving, len(slots) - 1)))


@SLOTS
def test_a_fork_is_independent_of_its_origin(kind: type[SlabCache]) -> None:
    rng, witness = random.Random(2), Witness(2, kind=kind)
    slot = witness.acquire()
    for done in range(0, 1280, 256):
        witness.feed(pack_prefix([0] * 256, slot, done, CPU), [list(range(1, 256))])
    twin = witness.cache.fork(slot)
    witness.history[twin] = witness.history[slot]
    for _ in range(4):
        for one in (slot, twin):
            draft = random_tree(rng, 6)
            rows = pack([0], [draft], [one], [witness.cache.lengths[one]], CPU)
            witness.feed(rows, [some_path(rng, draft)])
    witness.cache.release(slot)
    witness.feed(pack([0], [Draft()], [twin], [witness.cache.lengths[twin]], CPU), [[]])


@SLOTS
def test_going_back_in_a_ring_keeps_only_the_remaining_columns(kind: type[SlabCache]) -> None:
    witness = Witness(3, kind=kind)
    slot = witness.acquire()
    for done in range(0, 1280, 256):
        witness.feed(pack_prefix([0] * 256, slot, done, CPU), [list(range(1, 256))])
    witness.cache.truncate(slot, 1270)
    assert witness.cache.lengths[slot] == 1270
    witness.history[slot] = [(k[:1270], v[:1270]) for k, v in witness.history[slot]]
    witness.feed(pack([0], [Draft.chain([1, 2, 3])], [slot], [1270], CPU), [[1, 2]])
    least = 1280 - 1024 + 19
    witness.cache.truncate(slot, least)
    assert witness.cache.lengths[slot] == least
    witness.history[slot] = [(k[:least], v[:least]) for k, v in witness.history[slot]]
    witness.feed(pack([0], [Draft.chain([1, 2, 3])], [slot], [least], CPU), [[1, 2]])
    witness.cache.truncate(slot, least - 1)
    assert witness.cache.lengths[slot] == 0, "row 274 would see position 255, which 1279 has overwritten"
    witness.history[slot] = [(k[:0], v[:0]) for k, v in witness.history[slot]]
    witness.feed(pack_prefix([0] * 30, slot, 0, CPU), [list(range(1, 30))])


def test_depths_and_positions_agree() -> None:
    draft = Draft((1, 2, 3), (0, 0, 2))
    rows = pack([0], [draft], [0], [7], CPU)
    assert rows.positions[0, :4].tolist() == [7 + d for d in depths(draft.parents)]
    assert BLOCK % 2 == 0, "pairs never straddle a block"


@SLOTS
def test_a_failed_request_does_not_affect_other_requests(kind: type[SlabCache]) -> None:
    """A masked column is still multiplied by a weight of 0, and 0 times NaN is NaN."""
    witness = Witness(4, kind=kind)
    first, second = witness.acquire(), witness.acquire()
    witness.feed(pack_prefix([0] * 40, second, 0, CPU), [list(range(1, 40))])
    witness.draw = lambda b, t, heads: torch.full((b, t, heads, D), torch.nan, dtype=torch.float64)  # type: ignore[method-assign]
    with torch.inference_mode():
        view = witness.cache.begin(pack_prefix([0] * 60, first, 0, CPU))
        for layer in range(len(LAYERS)):
            view.attend(layer, *(witness.draw(1, 60, h) for h in (HEADS, KV, KV)))
    witness.cache.release(first)
    del witness.draw  # type: ignore[attr-defined]
    third = witness.acquire()
    witness.feed(pack_prefix([0] * 4, third, 0, CPU), [[1, 2, 3]])
    lengths = [witness.cache.lengths[s] for s in (third, second)]
    witness.feed(pack([0, 0], [Draft(), Draft()], [third, second], lengths, CPU), [[], []])
