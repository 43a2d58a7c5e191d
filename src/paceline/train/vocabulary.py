"""A vocabulary for the drafter: the tokens that the target writes, by measured coverage.

A head over the whole vocabulary costs more than all else of a small drafter, and a few thousand tokens make nearly all
of what is written (FR-Spec, arXiv 2502.14856; EAGLE-3's `d2t`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from paceline.errors import InvalidOption


def count(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token comes in the texts (token ids), int64 [V]; they are read one after the other.

    Raises `InvalidOption` for a token that is not below `vocab_size`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    tokens = chain.from_iterable(texts)
    while some := list(islice(tokens, 1 << 16)):
        part = torch.bincount(torch.tensor(some), minlength=vocab_size)
        if len(part) > vocab_size:
            raise InvalidOption(f"token {max(some)} is not in a vocabulary of {vocab_size}", "Give the target's own")
        counts += part
    return counts


def choose(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` tokens to draft from, int64 [size], ascending: those of `always` (EOS), then the most frequent, of
    equally frequent ones the lowest, since merges that came early are the common ones. `counts` [V].

    Raises `InvalidOption` for a size that has no room for `always`, or above V.
    """
    wanted = _ranked(counts, always)
    if not len(set(always)) <= size <= len(counts) or size < 1:
        raise InvalidOption(
            f"a draft vocabulary of {size} tokens is not possible",
            f"Give from {max(1, len(set(always)))} to {len(counts)}",
        )
    return wanted[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """The share of the counted tokens that is among `ids`; 1 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids.unique()].sum()) / total if total else 1.0


def size_for(counts: Tensor, share: float, always: Sequence[int] = ()) -> int:
    """The smallest size for which what `choose` takes covers at least `share` (0 to 1) of the counted tokens."""
    if not 0.0 <= share <= 1.0:
        raise InvalidOption(f"a coverage of {share} is not possible", "Give a share from 0 to 1")
    covered = counts[_ranked(counts, always)].cumsum(0)
    total = int(covered[-1])
    enough = next(
        (n for n, tokens in enumerate(covered.tolist(), 1) if not total or tokens / total >= share), len(counts)
    )
    return max(enough, len(set(always)), 1)


def _ranked(counts: Tensor, always: Sequence[int]) -> Tensor:
    """All tokens, those to be chosen first at the front."""
    rank = counts.clone()
    rank[list(always)] = counts.sum() + 1
    return rank.argsort(descending=True, stable=True)
