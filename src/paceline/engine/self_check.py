"""The start-up self-check: test whether a row's result depends on the other rows of its pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK
from paceline.errors import InvalidOption
from paceline.protocols import Adaptable, Divisible, KVCache, Target
from paceline.types import Draft, DraftBudget, Guarantee, Rows, Want
from paceline.verify.tree import PREFILL_ROWS, pack, with_siblings

_PREFIX_LENGTHS, _COMPARED_ROWS, _MAX_PASS_ROWS = (61, 5), 5, 32
"""Lengths of the prefixes before the compared rows, number of compared rows, and upper bound for the rows of the
longest pass.

Both prefixes are needed, because torch's matrix multiplications may give rows different bits after a short text, but
the same bits after a longer one."""


def guarantee(target: Target) -> Guarantee:
    """Check whether speculation can change the bits of logits.

    The same rows are fed one by one, in chains, in trees, and together with another request. Their logits must be
    identical. Once they are committed, the logits of the next row must be identical too. The check takes 16 small
    passes. If the model has adapters or torch computes some matrix multiplications, it takes 32 passes for plain rows
    and 32 for each adapter. If rows differ, the check stops after three passes. It uses the target's `excerpt` if there
    is one.

    Returns:
        "bits" if all logits are identical: text with speculation equals plain decoding bit for bit. Otherwise
        "rounding": a token may differ if two candidates are nearly equal.
    """
    prefixes: tuple[int, ...] = _PREFIX_LENGTHS
    if isinstance(target, Divisible):
        prefixes = _PREFIX_LENGTHS[:1] if target.rows_are_independent else _PREFIX_LENGTHS
        target = target.excerpt()
    count = 1 + _adapters(target)
    if target.context_length <= _MAX_PASS_ROWS:
        return "rounding"
    ways = product(prefixes, range(count))
    return "bits" if all(_same_bits(target, *way, (way[1] + 1) % count) for way in ways) else "rounding"


def check_exact(guarantee: Guarantee, device: torch.device) -> None:
    """Check the option `exact`.

    Raises:
        InvalidOption: If the guarantee is not "bits".
    """
    if guarantee != "bits":
        raise InvalidOption(
            f"exact=True is not possible: in this model on {device}, logits depend on the batch composition, "
            "so text equals plain decoding only up to rounding",
            'Use dtype="bfloat16" on a CPU with a C++ compiler, or omit exact=True',
        )


def _adapters(target: Target) -> int:
    return len(target.adapters) if isinstance(target, Adaptable) else 0


def _same_bits(target: Target, before: int, adapter: int, neighbour: int) -> bool:
    """Return True if the guarantee is "bits" after `before` tokens, for requests with this adapter. `neighbour`:
    Adapter of another request in the same pass."""
    before = min(before, target.context_length - _MAX_PASS_ROWS)
    tokens = _tokens(target, before + _COMPARED_ROWS)
    cache, path = target.new_cache(), tokens[before:]
    slot = cache.acquire(0, adapter)
    _feed(target, cache, slot, tokens[:before], (PREFILL_ROWS,), prompt=True)
    chain, numbers = Draft.chain(path[1:]), [*range(1, _COMPARED_ROWS)]
    ways = [(Draft.chain(path[1:] + path * 5), numbers), (chain, numbers)]
    if cache.fit(slot, DraftBudget(nodes=8, depth=4, branch=2)).branch > 1:
        ways.append(with_siblings(path[1:], path[0]))
    other = cache.fork(slot)
    singles, alone = _singly(target, cache, other, (*path, path[0])), list[Tensor]()
    # Run the longest pass first, and compare it row by row. If rows change each other's bits, its first row already
    # shows it.
    for draft, numbers in ways:
        same = cache.fork(slot)
        for i, row in enumerate(_together(target, cache, same, path[0], draft, numbers)):
            if i == len(alone):
                alone.append(next(singles))
            if not torch.equal(row, alone[i]):
                return False
        cache.release(same)
    # Now put a longer text and a text with another adapter into the same pass.
    third = cache.acquire(0, neighbour)
    _feed(target, cache, third, tokens[:before], (PREFILL_ROWS,), prompt=True)
    _, logits = _verify(target, cache, [other, third, slot], path[:1] * 3, [Draft(), Draft(), chain])
    return torch.equal(logits[2, :_COMPARED_ROWS], torch.stack(alone[:_COMPARED_ROWS]))


def _singly(target: Target, cache: KVCache, slot: int, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Feed tokens one by one, and yield the logits after each token."""
    for token in tokens:
        rows, logits = _verify(target, cache, [slot], [token], [Draft()])
        yield logits[0, 0]
        cache.commit(rows, [()])


def _together(
    target: Target, cache: KVCache, slot: int, token: int, draft: Draft, path: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the logits of a token and of a path of a draft, computed in one pass. Then commit these rows, feed the same
    token again, and yield its logits."""
    rows, logits = _verify(target, cache, [slot], [token], [draft])
    yield from logits[0, [0, *path]]
    cache.commit(rows, [path])
    yield _verify(target, cache, [slot], [token], [Draft()])[1][0, 0]


def chunk_invariant(target: Target, guarantee: Guarantee) -> bool:
    """Return True if a token leaves the same bits in keys, values and states, whichever pass feeds it.

    The pass may be a prompt chunk of any size, or a round. If the result is True, a text can continue from any other
    text with the same prefix (`prefix_cache.py`). The check feeds a prompt slightly longer than `BLOCK`, because sums
    are split there, and a few other passes. Like `guarantee`, it runs the target's `excerpt` if there is one.

    Args:
        target: The target.
        guarantee: Result of the function `guarantee` for the target.
    """
    length = min(BLOCK + _MAX_PASS_ROWS, target.context_length - _MAX_PASS_ROWS)
    if guarantee != "bits" or length < 2 * _MAX_PASS_ROWS:
        return False
    if isinstance(target, Divisible):
        target = target.excerpt()
    tokens = _tokens(target, length)
    # Rows with an adapter also go through all operations of plain rows, so checking them is enough.
    cache, adapter = target.new_cache(), min(1, _adapters(target))
    slot = cache.acquire(length, adapter)
    _feed(target, cache, slot, tokens, (PREFILL_ROWS,), prompt=True)
    whole, late = cache.save(slot), length - 2 * _MAX_PASS_ROWS
    early = whole.most(2 * _MAX_PASS_ROWS, length) or min(PREFILL_ROWS, length)
    ways = ((0, early, (3, 1, 60), True), (late, length, (3, 61), True), (late, length, (7, 1), False))
    for start, end, sizes, prompt in ways:
        other, same = cache.acquire(length, adapter), cache.acquire(length, adapter)
        if start and not cache.load(other, whole, start):
            return False
        _feed(target, cache, other, tokens[:start], (PREFILL_ROWS,), prompt=True)
        _feed(target, cache, other, tokens[:end], sizes, prompt)
        kept, (ours, theirs) = cache.load(same, whole, end), (cache.save(x).tensors for x in (other, same))
        if kept != end or len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
            return False
    return True


def _feed(target: Target, cache: KVCache, slot: int, tokens: Sequence[int], sizes: Sequence[int], prompt: bool) -> None:
    """Feed the tokens that the slot lacks, either as a prompt or as chains in rounds. The sizes of the passes cycle
    through `sizes`."""
    size = cycle(sizes)
    while rest := tokens[cache.lengths[slot] :]:
        length, count = cache.lengths[slot], min(next(size), len(rest))
        if not prompt:
            count = 1 + cache.fit(slot, DraftBudget.chain(count - 1)).nodes
        rows = pack([rest[0]], [Draft.chain(tuple(rest[1:count]))], [slot], [length], target.device)
        target.forward(replace(rows, prefill=prompt), cache, Want("none"))
        cache.commit(rows, [range(1, count)])


def _verify(
    target: Target, cache: KVCache, slots: Sequence[int], last: Sequence[int], drafts: Sequence[Draft]
) -> tuple[Rows, Tensor]:
    """Return the rows and the logits [B, T, V] of a verification pass."""
    rows = pack(last, drafts, slots, [cache.lengths[slot] for slot in slots], target.device)
    return rows, target.forward(rows, cache, Want()).logits


def _tokens(target: Target, count: int) -> list[int]:
    return [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(count)]
