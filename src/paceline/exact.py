"""The start-up self-check: does a row's result depend on how many rows travel with it?"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.protocols import KVCache, Target
from paceline.stats import Exact
from paceline.tree import pack, pack_prefix
from paceline.types import Draft, Want

_PREFIX, _ROWS = 23, 5


def exactness(target: Target) -> Exact:
    """ "bits" if rows fed one by one, in chains, in trees and in other chunks all give the very same logits.

    Then text with speculation is plain decoding's text bit for bit; otherwise up to rounding: a token may differ
    where two candidates are within an ulp or so. Costs about a dozen small passes.
    """
    tokens = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(_PREFIX + _ROWS)]
    prefix, rest = tokens[:_PREFIX], tokens[_PREFIX:]
    plain = _one_by_one(target, prefix, rest)
    wide = [*rest, *tokens[:_PREFIX], *rest]
    siblings = Draft((*rest[1:], *rest[1:]), (*range(_ROWS - 1), 1, 2, 2, 3))
    passes = [
        _verify(target, [prefix], rest[0], Draft.chain(rest[1:])),
        _verify(target, [prefix[:9], prefix[9:]], rest[0], siblings),
        _verify(target, [prefix], rest[0], Draft.chain(rest[1:] + prefix[:4])),
        _verify(target, [prefix[:16], prefix[16:]], wide[0], Draft.chain(wide[1:])),
    ]
    same = all(torch.equal(logits[: len(rest)], plain) for logits in passes)
    return "bits" if same else "rounding"


def _one_by_one(target: Target, prefix: list[int], rest: list[int]) -> Tensor:
    cache, slot = _filled(target, [prefix])
    rows = []
    for token in rest:
        batch = pack([token], [Draft()], [slot], [cache.lengths[slot]], target.device)
        rows.append(target.forward(batch, cache, Want()).logits[0, 0])
        cache.commit(slot, ())
    return torch.stack(rows)


def _verify(target: Target, chunks: list[list[int]], last: int, draft: Draft) -> Tensor:
    cache, slot = _filled(target, chunks)
    batch = pack([last], [draft], [slot], [cache.lengths[slot]], target.device)
    return target.forward(batch, cache, Want()).logits[0]


def _filled(target: Target, chunks: list[list[int]]) -> tuple[KVCache, int]:
    cache = target.new_cache()
    slot = cache.acquire()
    for chunk in chunks:
        target.forward(pack_prefix(chunk, slot, cache.lengths[slot], target.device), cache, Want("none"))
        cache.commit(slot, range(1, len(chunk)))
    return cache, slot
