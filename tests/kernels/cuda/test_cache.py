"""The device cache compared with the slab cache, which tests/support/cache_witness.py checks."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.slab import SlabCache
from paceline.kernels.cuda.cache import DeviceCache
from paceline.kernels.cuda.table import RowTable
from paceline.types import Draft, DraftBudget, Rows
from paceline.verify.tree import pack, pack_prefix
from tests.support.cache_witness import CPU, HEADS, KV, LAYERS, D, random_tree, some_path


class Pair:
    """A slab cache and a device cache with the same input."""

    def __init__(self) -> None:
        self.caches = [kind(LAYERS, KV, D, 4096, torch.float64, CPU) for kind in (SlabCache, DeviceCache)]
        self.slots: list[list[int]] = []
        self.random = torch.Generator().manual_seed(0)

    def acquire(self, length: int) -> int:
        """Add a text of `length` tokens. Return its number."""
        self.slots.append([cache.acquire() for cache in self.caches])
        for done in range(0, length, 200):
            chunk = [0] * min(200, length - done)
            self.feed(
                [len(self.slots) - 1],
                lambda slots, n=done, c=chunk: pack_prefix(c, slots[0], n, CPU),
                [range(1, len(chunk))],
            )
        return len(self.slots) - 1

    def verify(self, texts: list[int], drafts: list[Draft], paths: list[list[int]]) -> None:
        lengths = [self.caches[0].lengths[self.slots[text][0]] for text in texts]
        self.feed(texts, lambda slots: pack([0] * len(slots), drafts, slots, lengths, CPU), paths)

    @torch.inference_mode()
    def feed(self, texts, make, paths) -> None:  # type: ignore[no-untyped-def]
        slots = [[self.slots[text][side] for text in texts] for side in range(2)]
        each: list[Rows] = [make(s) for s in slots]
        b, t = each[0].tokens.shape
        passes = [cache.begin(rows) for cache, rows in zip(self.caches, each, strict=True)]
        for layer in range(len(LAYERS)):
            q, k, v = (torch.randn(b, t, n, D, generator=self.random, dtype=torch.float64) for n in (HEADS, KV, KV))
            ours, theirs = (one.attend(layer, q, k, v).flatten(0, 1)[each[0].lines] for one in passes)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        for cache, rows in zip(self.caches, each, strict=True):
            cache.commit(rows, paths)

    @torch.inference_mode()
    def load(self, text: int, length: int) -> int:
        """Add a text that begins like another text. Return its number."""
        self.slots.append([cache.acquire() for cache in self.caches])
        for cache, source, slot in zip(self.caches, self.slots[text], self.slots[-1], strict=True):
            assert cache.load(slot, cache.save(source), length) == length
        return len(self.slots) - 1

    def release(self, text: int) -> None:
        for cache, slot in zip(self.caches, self.slots[text], strict=True):
            cache.release(slot)


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [((0, 250, 1020, 1530), 2048), pytest.param((0, 250, 1020, 1530, 2045), 4096, marks=pytest.mark.slow)],
    ids=["both rings", "twice"],
)
def test_rows_see_the_right_rows_at_any_text_length(lengths: tuple[int, ...], capacity: int) -> None:
    """Run trees and commits around blocks, windows and the ring buffer sizes (1024 and 1536)."""
    rng, pair = random.Random(0), Pair()
    for length in lengths:
        text = pair.acquire(length)
        for _ in range(2):
            fits = pair.caches[0].fit(pair.slots[text][0], DraftBudget(9, 9, 3))
            draft = random_tree(rng, fits.nodes)
            pair.verify([text], [draft], [some_path(rng, draft)])
        pair.release(text)
    assert [slab.capacity for slab in pair.caches[1].slabs] == [
        slab._limit if slab.ring else capacity for slab in pair.caches[1].slabs
    ]


@pytest.mark.parametrize("lengths", [(5, 1100), pytest.param((5, 700, 1100, 2045), marks=pytest.mark.slow)])
def test_texts_begin_like_others_around_the_wrap_of_rings(lengths: tuple[int, ...]) -> None:
    rng, pair = random.Random(2), Pair()
    for length in lengths:
        text = pair.acquire(length)
        texts = [text, pair.load(text, length), pair.load(text, length - 4)]
        for _ in range(3):
            drafts = [random_tree(rng, 6) for _ in texts]
            pair.verify(texts, drafts, [some_path(rng, draft) for draft in drafts])
        for used in texts:
            pair.release(used)


def test_texts_of_any_length_share_a_pass_and_leave_in_any_order() -> None:
    rng, pair = random.Random(1), Pair()
    texts = [pair.acquire(length) for length in (3, 30, 700, 1030, 8)]
    for leaving in (1, 3, 0, None):
        rng.shuffle(texts)
        drafts = [random_tree(rng, 5) for _ in texts]
        pair.verify(texts, drafts, [some_path(rng, draft) for draft in drafts])
        if leaving is not None:
            pair.release(texts.pop(leaving))


def test_a_tree_may_grow_over_passes() -> None:
    """Each pass adds a level. It sees the rows of earlier passes, but not the rows that overwrite them later."""
    pair = Pair()
    text = pair.acquire(37)
    drafts = [Draft(), Draft((1, 2), (0, 0)), Draft((1, 2, 3, 4), (0, 0, 2, 1))]
    for start, draft in zip((0, 1, 3), drafts, strict=True):
        pair.feed([text], lambda slots, d=draft, s=start: pack([0], [d], slots, [37], CPU, [s]), [[]])
        for cache, slot in zip(pair.caches, pair.slots[text], strict=True):
            cache.truncate(slot, 37)


def test_a_long_draft_is_not_cut_at_a_block() -> None:
    cache = Pair().caches[1]
    assert cache.fit(cache.acquire(), DraftBudget(64, 64, 1)) == DraftBudget(64, 64, 1)
    assert cache.fit(cache.acquire(), DraftBudget(512, 9, 3)).nodes == 511


def test_a_table_holds_the_rows_of_each_path_and_fills_up_with_roots() -> None:
    draft = Draft((1, 2, 3, 4), (0, 0, 2, 3))
    rows = pack([7], [draft], [5], [40], CPU)
    table = RowTable(2, 8, 8, CPU)
    table.fill(rows, [3])
    assert table.tokens.tolist() == [[7, 1, 2, 3, 4, 0, 0, 0], [0] * 8]
    assert table.lengths.tolist() == [40, 0]
    assert table.places.tolist() == [3, 0]
    assert table.depths[0].tolist() == [0, 1, 1, 2, 3, 0, 0, 0]
    assert table.paths[0, 4, :4].tolist() == [0, 2, 3, 4]
    assert table.paths[0, 6, 0] == 6, "a root sees itself"
    assert table.positions()[0].tolist() == [40, 41, 41, 42, 43, 40, 40, 40]


@pytest.mark.parametrize("slots", [1, 3])
def test_graphs_are_forgotten_where_a_slab_moves(slots: int) -> None:
    cache = DeviceCache(LAYERS, KV, D, 4096, torch.float64, CPU)
    taken = [cache.acquire() for _ in range(slots)]
    rows = pack([0], [Draft()], taken[:1], [0], CPU)
    cache.places(rows, 4)
    cache.graphs["size"] = RowTable(1, 4, 4, CPU), lambda: None  # type: ignore[assignment,return-value]
    cache.places(rows, 4)
    assert cache.graphs
    cache.acquire() if slots == 3 else cache.places(pack([0], [Draft()], taken[:1], [2047], CPU), 4)
    cache.places(rows, 4)
    assert not cache.graphs
