"""Mixture of experts: a router sends each row through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.linear import Linear
from paceline.models.layers import Dense, Sublayer
from paceline.verify.tree import MIN_ROWS


class Mixture(Sublayer):
    """Top-k experts by softmax (Shazeer et al. 2017; Mixtral, Qwen3).

    A row's bits do not depend on other rows: ties go to the expert of lower number, an expert's product has at least
    `MIN_ROWS` rows, and a row's experts are summed in the order of their numbers, as in transformers, but in float32
    (float64 for a float64 model).
    """

    def __init__(self, router: Linear, experts: Sequence[Dense], used: int, normalised: bool) -> None:
        self.router, self.experts = router, experts
        self.used, self.normalised = used, normalised

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self._route(rows)
        total = torch.zeros_like(rows, dtype=weights.dtype)
        for number in chosen.unique().tolist():
            here, rank = (chosen == number).nonzero(as_tuple=True)
            total.index_add_(0, here, _padded(self.experts[number], rows[here]) * weights[here, rank, None])
        return total.to(x.dtype).view_as(x)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each row, both [N, used]."""
        precise = torch.float64 if rows.dtype == torch.float64 else torch.float32
        scores = self.router(rows).softmax(-1, dtype=precise)
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        weights, chosen = best[:, : self.used], order[:, : self.used]
        return (weights / weights.sum(-1, keepdim=True) if self.normalised else weights), chosen


def _padded(expert: Dense, rows: Tensor) -> Tensor:
    count = len(rows)
    if count < MIN_ROWS:
        rows = torch.cat([rows, rows[:1].expand(MIN_ROWS - count, -1)])
    return expert(rows)[:count]
