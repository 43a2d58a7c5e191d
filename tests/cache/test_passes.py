"""Every kind of cache commits a pass only once, and only if it is the latest pass of its slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.cache.shared import SharedSlabCache
from paceline.cache.slab import SlabCache
from paceline.errors import CacheError
from paceline.kernels.cuda.cache import DeviceCache
from paceline.types import Draft, Rows
from paceline.verify.tree import pack
from tests.support.cache_witness import CPU, KV, LAYERS, D
from tests.support.hybrids import tiny_hybrid

CACHES: dict[str, Callable[[], SlabCache]] = {
    "slab": lambda: SlabCache(LAYERS, KV, D, 4096, torch.float64, CPU),
    "shared": lambda: SharedSlabCache(LAYERS, KV, D, 4096, torch.float64, CPU),
    "device": lambda: DeviceCache(LAYERS, KV, D, 4096, torch.float64, CPU),
    "recurrent": tiny_hybrid().new_cache,  # type: ignore[dict-item]
}


def begin_pass(cache: SlabCache, *slots: int) -> Rows:
    """Begin a pass over each slot's last token (row 0) and two drafted children (rows 1 and 2). Return its rows."""
    lengths = [cache.lengths[slot] for slot in slots]
    rows = pack([3] * len(slots), [Draft((5, 6), (0, 0))] * len(slots), slots, lengths, CPU)
    cache.begin(rows)
    return rows


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> SlabCache:
    return CACHES[request.param]()


def test_an_earlier_pass_cannot_be_committed_before_the_latest_one(cache: SlabCache) -> None:
    slot = cache.acquire()
    earlier, latest = begin_pass(cache, slot), begin_pass(cache, slot)
    with pytest.raises(CacheError, match="Commit only the slot's latest pass, and only once"):
        cache.commit(earlier, [[2]])
    assert cache.lengths[slot] == 0
    cache.commit(latest, [[2]])
    assert cache.lengths[slot] == 2


def test_an_earlier_pass_cannot_be_committed_after_the_latest_one(cache: SlabCache) -> None:
    slot = cache.acquire()
    earlier, latest = begin_pass(cache, slot), begin_pass(cache, slot)
    cache.commit(latest, [[2]])
    for rows in (earlier, latest):
        with pytest.raises(CacheError, match="Commit only the slot's latest pass, and only once"):
            cache.commit(rows, [[]])
    assert cache.lengths[slot] == 2
    cache.commit(begin_pass(cache, slot), [[]])
    assert cache.lengths[slot] == 3


def test_a_new_pass_replaces_the_pass_of_its_own_slot_only(cache: SlabCache) -> None:
    first, second = cache.acquire(), cache.acquire()
    both, later = begin_pass(cache, first, second), begin_pass(cache, second)
    with pytest.raises(CacheError, match="Commit only the slot's latest pass, and only once"):
        cache.commit(both, [None, [1]])
    cache.commit(both, [[1], None])
    cache.commit(later, [[2]])
    assert [cache.lengths[slot] for slot in (first, second)] == [2, 2]


def test_releasing_a_slot_ends_its_pass(cache: SlabCache) -> None:
    slot = cache.acquire()
    rows = begin_pass(cache, slot)
    cache.release(slot)
    assert cache.acquire() == slot
    with pytest.raises(CacheError, match="Commit only the slot's latest pass, and only once"):
        cache.commit(rows, [[1]])
