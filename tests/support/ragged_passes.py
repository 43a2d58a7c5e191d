"""Passes over slots with different lengths and drafts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.types import Draft, Forward, Rows, Want
from paceline.verify.tree import pack, pack_prefix, with_siblings
from tests.support.native_models import CPU, text

DRAFTS = (
    Draft.chain(text(15, 4)),
    Draft(),
    with_siblings(text(4, 5), 66)[0],
    Draft.chain([5]),
    Draft((1, 2, 3, 4, 5), (0, 1, 0, 3, 1)),
)


def filled(target: Decoder, lengths: Sequence[int]) -> tuple[KVCache, list[int]]:
    """Return a cache with several texts, and their slots."""
    cache, slots = target.new_cache(), []
    for seed, length in enumerate(lengths):
        slots.append(cache.acquire())
        for done in range(0, length, 200):
            part = text(length, seed)[done : done + 200]
            rows = pack_prefix(part, slots[-1], done, CPU)
            target.forward(rows, cache, Want("none"))
            cache.commit(rows, [range(1, len(part))])
    return cache, slots


def verify(
    target: Decoder, cache: KVCache, slots: Sequence[int], drafts: Sequence[Draft], want: Want, *starts: int
) -> Forward:
    return target.forward(packed(cache, slots, drafts, *starts), cache, want)


def packed(cache: KVCache, slots: Sequence[int], drafts: Sequence[Draft], *starts: int) -> Rows:
    lengths = [cache.lengths[slot] for slot in slots]
    return pack([9] * len(slots), drafts, slots, lengths, CPU, starts or None)
