"""The start-up self-check: does a row's result depend on the other rows of its pass?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK
from paceline.protocols import KVCache, Target
from paceline.types import Draft, DraftBudget, Guarantee, Want
from paceline.verify.tree import PREFILL_ROWS, beside, pack, pack_prefix

_PREFIX, _ROWS, _LONGEST = 61, 5, 32
"""Tokens before the compared rows; compared rows; rows of the longest pass, rounded up."""


def guarantee(target: Target) -> Guarantee:
    """Return "bits" if rows fed one by one, in chains, in trees and beside another request give identical logits.

    Then text with speculation is plain decoding's bit for bit; otherwise up to rounding: a token may differ where two
    candidates are within an ulp or so. Costs ten small passes.
    """
    before = min(_PREFIX, target.context_length - _LONGEST)
    if before < 1:
        return "rounding"
    tokens = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(before + _ROWS)]
    prefix, path = tokens[:before], tokens[before:]
    cache, slot = _filled(target, prefix)
    plain = []
    for token in path:
        rows = pack([token], [Draft()], [slot], [cache.lengths[slot]], target.device)
        plain.append(target.forward(rows, cache, Want()).logits[0, 0])
        cache.commit(rows, [()])
    alone = torch.stack(plain)
    trees = cache.fit(slot, DraftBudget(nodes=8, depth=4, branch=2)).branch > 1
    for draft, found in _other_ways(path, trees):
        cache.truncate(slot, before)
        if not torch.equal(_logits(target, cache, slot, path[0], draft)[found], alone):
            return "rounding"
    return "bits" if torch.equal(_shared(target, cache, slot, path, before), alone) else "rounding"


def seamless(target: Target, guarantee: Guarantee) -> bool:
    """Whether a token leaves the same keys and values, bit for bit, in any pass: in a prompt's chunks, however they are
    cut, or as a row of a round. `guarantee`: the result of `guarantee`.

    Then any text can continue from any other that begins like it (`prefix_cache.py`). Costs a prompt a little longer
    than `BLOCK`, where sums are split, and a few passes more.
    """
    length = min(BLOCK + _LONGEST, target.context_length - _LONGEST)
    if guarantee != "bits" or length < 2 * _LONGEST:
        return False
    tokens = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(length)]
    cache = target.new_cache()
    slot = cache.acquire(length)
    _feed(target, cache, slot, tokens, (PREFILL_ROWS,), prompt=True)
    whole, late = cache.save(slot), length - 2 * _LONGEST
    ways = ((0, 2 * _LONGEST, (3, 1, 60), True), (late, length, (3, 61), True), (late, length, (7, 1), False))
    for start, end, sizes, prompt in ways:
        other, same = cache.acquire(length), cache.acquire(length)
        if start and cache.load(other, whole, start) != start:
            return False
        _feed(target, cache, other, tokens[:end], sizes, prompt)
        cache.load(same, whole, end)
        if not all(map(torch.equal, cache.save(other).tensors, cache.save(same).tensors)):
            return False
    return True


def _feed(target: Target, cache: KVCache, slot: int, tokens: Sequence[int], sizes: Sequence[int], prompt: bool) -> None:
    """Feed the tokens that the slot lacks: as a prompt in chunks of these sizes in turn, or as chains in rounds."""
    size = cycle(sizes)
    while rest := tokens[cache.lengths[slot] :]:
        length, count = cache.lengths[slot], min(next(size), len(rest))
        if not prompt:
            count = 1 + cache.fit(slot, DraftBudget.chain(count - 1)).nodes
        rows = pack([rest[0]], [Draft.chain(tuple(rest[1:count]))], [slot], [length], target.device)
        target.forward(replace(rows, prefill=prompt), cache, Want("none"))
        cache.commit(rows, [range(1, count)])


def _shared(target: Target, cache: KVCache, slot: int, path: list[int], before: int) -> Tensor:
    """Return logits [T, V] of the path, verified beside a longer text."""
    cache.truncate(slot, before)
    other = cache.fork(slot)
    rows = pack([path[0]], [Draft.chain(path[1:])], [other], [before], target.device)
    target.forward(rows, cache, Want())
    cache.commit(rows, [range(1, len(path))])
    drafts = [Draft(), Draft.chain(path[1:])]
    rows = pack([path[0]] * 2, drafts, [other, slot], [cache.lengths[other], before], target.device)
    return target.forward(rows, cache, Want()).logits[1, : len(path)]


def _logits(target: Target, cache: KVCache, slot: int, last: int, draft: Draft) -> Tensor:
    """Return logits [T, V] of one verify pass."""
    rows = pack([last], [draft], [slot], [cache.lengths[slot]], target.device)
    return target.forward(rows, cache, Want()).logits[0]


def _filled(target: Target, prefix: list[int]) -> tuple[KVCache, int]:
    cache = target.new_cache()
    slot = cache.acquire()
    rows = pack_prefix(prefix, slot, 0, target.device)
    target.forward(rows, cache, Want("none"))
    cache.commit(rows, [range(1, len(prefix))])
    return cache, slot


def _other_ways(path: list[int], trees: bool) -> list[tuple[Draft, list[int]]]:
    """Return drafts that contain the path, and the path's rows. `trees`: whether the target verifies trees."""
    tree, rows = beside(path[1:], path[0])
    return [
        (Draft.chain(path[1:]), [0, 1, 2, 3, 4]),
        (Draft.chain(path[1:] + path * 5), [0, 1, 2, 3, 4]),
        *([(tree, [0, *rows])] if trees else []),
    ]
