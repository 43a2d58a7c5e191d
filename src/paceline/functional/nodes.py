"""Nodes as they grow, and the candidate tree that is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.functional.candidates import NONE, CandidateTree


@dataclass(frozen=True, slots=True)
class NodeBatch:
    """M grown nodes per request, [B, M] each, parents first. A score of -inf is no node, nor is anything below it."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    scores: Tensor

    @staticmethod
    def join(blocks: Sequence[NodeBatch]) -> NodeBatch:
        """One after the other: the parents of each are rows of the whole."""
        return NodeBatch(
            tokens=torch.cat([block.tokens for block in blocks], 1),
            parents=torch.cat([block.parents for block in blocks], 1),
            depths=torch.cat([block.depths for block in blocks], 1),
            log_probs=torch.cat([block.log_probs for block in blocks], 1),
            scores=torch.cat([block.scores for block in blocks], 1),
        )

    def keep(self, wanted: Tensor, limit: int, branch: int, depth: int, broken: Tensor) -> tuple[CandidateTree, Tensor]:
        """The tree of the `limit` best among the `wanted` nodes, bool [B, M], and every old row's new one, [B, M + 1].

        `wanted` must hold the parents of what it holds. Scores only fall from parent to child and ties go to the
        older node, so the best of them are a tree too.
        """
        ranked = self.scores.masked_fill(~wanted, -torch.inf).sort(stable=True, dim=1, descending=True).indices
        kept = torch.zeros_like(wanted).scatter_(1, ranked[:, :limit], True) & wanted
        row_of = torch.nn.functional.pad(kept.cumsum(1), (1, 0))
        places = (~kept).to(torch.int8).sort(stable=True, dim=1).indices[:, :limit]
        counts = kept.sum(1)
        real = torch.arange(places.shape[1], device=places.device) < counts[:, None]

        def pick(values: Tensor, padding: float) -> Tensor:
            return values.gather(1, places).where(real, padding)

        tree = CandidateTree(
            tokens=pick(self.tokens, NONE),
            parents=pick(row_of.gather(1, self.parents), NONE),
            depths=pick(self.depths, 0),
            log_probs=pick(self.log_probs, -torch.inf),
            scores=pick(self.scores, -torch.inf),
            counts=counts,
            broken=broken,
            max_depth=depth,
            max_branch=branch,
        )
        return tree, row_of
