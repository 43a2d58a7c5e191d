"""Draft vocabulary: the tokens that the target writes most often.

An output head over the whole vocabulary costs more than the rest of a small drafter, and a few thousand tokens make up
nearly all text (FR-Spec, arXiv 2502.14856; EAGLE-3's `d2t`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from paceline.errors import InvalidOption


def count(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Return how often each token occurs in the texts (token ids), int64 [V].

    Raises `InvalidOption` for a token that is not below `vocab_size`.
    """
    found = Counter(chain.from_iterable(texts))
    if (highest := max(found, default=0)) >= vocab_size:
        raise InvalidOption(
            f"token ids must be below the vocabulary size {vocab_size}, got {highest}", "Use the target's tokens"
        )
    return torch.tensor([found[token] for token in range(vocab_size)])


def choose(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the `size` tokens to draft from, int64 [size], ascending: `always` (EOS), then the most frequent of
    `counts` [V]; ties go to the lowest id, since early merges are the common ones.

    Raises `InvalidOption` for a size below that of `always` or above V.
    """
    if not len(set(always)) <= size <= len(counts) or size < 1:
        raise InvalidOption(
            f"the draft vocabulary must have {max(1, len(set(always)))} to {len(counts)} tokens, got {size}",
            "Choose a size between them",
        )
    rank = counts.clone()
    rank[list(always)] = counts.sum() + 1
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of the counted tokens that is among `ids`; 1 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids.unique()].sum()) / total if total else 1.0
