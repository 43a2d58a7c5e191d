"""Threads that share the rows of a large pass in groups give the bits that one thread gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.cache import SlabCache
from paceline.models.decoder import Decoder
from paceline.native.build import library
from paceline.protocols import KVCache
from paceline.tree import beside, pack_prefix
from paceline.types import Draft, Forward, Tap, Want
from tests.test_native_layers import BASE, CPU, MODELS, kernels_for_every_product, native, plan, text
from tests.test_native_ragged import DRAFTS, filled, verify

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
_ = kernels_for_every_product

THREADS = (2, 3, 5)
LENGTHS = (20, 7, 41, 300, 33, 1, 90, 64)
TREE = beside([3, *text(9, 1)], 66)[0]
MANY = (*DRAFTS, Draft.chain(text(40, 2)), Draft(), TREE)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def same_with_threads(
    target: Decoder, lengths: Sequence[int], run: Callable[[KVCache, list[int]], Forward], counts: Sequence[int]
) -> None:
    """`run` gets a cache that no earlier pass has written the right keys into. `counts`: the real rows of each slot."""

    def on(threads: int) -> Forward:
        torch.set_num_threads(1)
        cache, slots = filled(target, lengths)
        torch.set_num_threads(threads)
        return run(cache, slots)

    right = on(1)
    for threads in THREADS:
        out = on(threads)
        for line, count in enumerate(counts):
            assert torch.equal(out.logits[line, :count], right.logits[line, :count]), (threads, line)
            for tap, states in right.taps.items():
                assert torch.equal(out.taps[tap][line, :count], states[line, :count]), (threads, line, tap)


@pytest.mark.parametrize("name", MODELS)
def test_slots_with_drafts(name: str) -> None:
    target = native(replace(BASE, **MODELS[name]))
    taps: tuple[Tap, ...] = (0, 1, target.layers, "final")
    counts = [1 + len(draft.tokens) for draft in MANY]
    same_with_threads(target, LENGTHS, lambda cache, slots: verify(target, cache, slots, MANY, Want(taps=taps)), counts)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [17, 64, 200])
def test_a_chunk_of_a_prompt_is_cut_into_pieces_that_see_each_other(name: str, length: int) -> None:
    target = native(replace(BASE, **MODELS[name]))

    def run(cache: KVCache, slots: list[int]) -> Forward:
        return target.forward(pack_prefix(text(length, 3), slots[0], 90, CPU), cache, Want(taps=(1,)))

    same_with_threads(target, [90], run, [length])


def test_what_a_pass_wrote_is_what_the_next_one_reads() -> None:
    """Through rings that have wrapped, with copies of parents beside their children."""
    target = native(replace(BASE, **plan(20, None), heads=2, kv_heads=1))
    after = []
    for threads in (1, *THREADS):
        torch.set_num_threads(threads)
        cache, slots = filled(target, (1021, 3, 1060, 600, 5, 9, 40, 2))
        verify(target, cache, slots, MANY, Want("none"))
        for slot, draft in zip(slots, MANY, strict=True):
            path = [len(draft.tokens)] if draft.tokens else []
            while path and draft.parents[path[0] - 1]:
                path.insert(0, draft.parents[path[0] - 1])
            cache.commit(slot, path)
        after.append(verify(target, cache, slots, [Draft()] * len(slots), Want()).logits[:, 0])
    assert all(torch.equal(x, after[0]) for x in after)


def test_rows_that_all_see_each_other_stay_together() -> None:
    """A block drafter's rows look ahead, in some layers or all: none of them can be a layer behind."""
    target = native(replace(BASE, **plan(60, None, 60)))

    def run(cache: KVCache, slots: list[int]) -> Forward:
        assert isinstance(cache, SlabCache)
        cache._kinds = [(60, False), (None, True)]
        return target.forward(pack_prefix(text(48, 3), slots[0], 30, CPU), cache, Want())

    same_with_threads(target, [30], run, [48])
