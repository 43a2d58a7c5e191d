"""Conversion of single requests' drafts to a padded batch and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.functional import CandidateTree
from paceline.types import Draft
from tests.support.trees import drafts

batches = st.lists(drafts(vocab=4), min_size=1, max_size=4)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)


def tree_of(batch: Sequence[Draft]) -> CandidateTree:
    return CandidateTree.of(padded([d.tokens for d in batch]), padded([d.parents for d in batch]))


def drafts_of(tree: CandidateTree) -> list[Draft]:
    """Return the nodes of each request without the padding, which must be at the end."""
    out = []
    for tokens, parents, count in zip(tree.tokens, tree.parents, tree.counts.tolist(), strict=True):
        assert (tokens[:count] >= 0).all()
        assert (tokens[count:] == -1).all()
        assert (parents[count:] == -1).all()
        out.append(Draft(tuple(tokens[:count].tolist()), tuple(parents[:count].tolist())))
    return out


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return the statistic's distance from its mean in standard deviations, below 4 for the right distribution."""
    seen, hoped = counts.double().flatten(), expected.double().flatten()
    assert (seen[hoped == 0] == 0).all()
    hoped = hoped * seen.sum() / hoped.sum()
    free = int((hoped > 0).sum()) - 1
    statistic = ((seen - hoped) ** 2 / hoped)[hoped > 0].sum()
    return float((statistic - free) / (2 * free) ** 0.5)
