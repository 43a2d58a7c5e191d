"""Draft vocabularies: the tokens that the target writes most often.

In a small drafter, an output head over the whole vocabulary takes most of the time, but a few thousand tokens make up
nearly all text (FR-Spec, arXiv 2502.14856; `d2t` in EAGLE-3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from paceline.errors import InvalidOption


def count(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Count the occurrences of each token.

    Args:
        texts: Token ids of each text.
        vocab_size: Size V of the vocabulary.

    Returns:
        int64 [V].

    Raises:
        InvalidOption: If a token id is not below `vocab_size`.
    """
    found = Counter(chain.from_iterable(texts))
    if (highest := max(found, default=0)) >= vocab_size:
        raise InvalidOption(
            f"token ids must be below the vocabulary size {vocab_size}, got {highest}",
            "Use token ids of the target's tokenizer",
        )
    return torch.tensor([found[token] for token in range(vocab_size)])


def choose(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Choose a draft vocabulary: the tokens `always`, then the most frequent tokens.

    Among tokens with equal counts, the lowest ids are chosen, since tokenizers number common merges first.

    Args:
        counts: Number of occurrences of each token, int64 [V].
        size: Number of tokens to choose.
        always: Tokens that are always included (EOS).

    Returns:
        Token ids, int64 [size], ascending.

    Raises:
        InvalidOption: If `size` is 0, less than the number of tokens in `always`, or greater than V.
    """
    if not len(set(always)) <= size <= len(counts) or size < 1:
        raise InvalidOption(
            f"the draft vocabulary must have {max(1, len(set(always)))} to {len(counts)} tokens, got {size}",
            "Choose a size in this range",
        )
    rank = counts.clone()
    rank[list(always)] = counts.sum() + 1
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of the counted tokens that a draft vocabulary contains.

    Args:
        counts: Number of occurrences of each token, int64 [V].
        ids: Token ids of the draft vocabulary.

    Returns:
        0 to 1. It is 1 if nothing was counted.
    """
    total = int(counts.sum())
    return int(counts[ids.unique()].sum()) / total if total else 1.0
