"""Drafts of heads that guess several places at once, none of them knowing what the others choose."""

from __future__ import annotations

from heapq import heappop, heappush

import torch
from torch import Tensor

from paceline.drafters.growth import ROOT, Drawn
from paceline.sampler import Ranked, Sampler
from paceline.types import Draft, Tree

_COMPARED = 16
"""So many of a place's best candidates share its probability, whatever the tree's branch."""


def independent(sampler: Sampler, budget: Tree, logits: Tensor) -> Draft:
    """The draft within `budget` for one request, row d of logits [D, V] being the guess at depth d + 1.

    The likeliest nodes of all that could be, where a node is as likely as its path's candidates together. Under a rule
    that draws, candidates are drawn for every parent by itself, into a fixed shape (`tree.shape`).
    """
    logits = logits[: budget.depth].cpu()
    return _drawn(sampler, budget, logits) if sampler.draws else _likeliest(budget, _levels(sampler, budget, logits))


def _levels(sampler: Sampler, budget: Tree, logits: Tensor) -> list[Ranked]:
    """The candidates of each depth. What processors say of them is said after the best path: it cannot be asked for
    every path there might be."""
    levels: list[Ranked] = []
    path: list[int] = []
    for row in logits:
        best = sampler.rank(row[None], [path], max(budget.branch, _COMPARED))[0]
        if not best.tokens:
            break
        levels.append(best)
        path.append(best.tokens[0])
    return levels


def _likeliest(budget: Tree, levels: list[Ranked]) -> Draft:
    """Best first: a node's child and its next sibling are less likely than itself, so nothing better is missed."""
    costs = [(-torch.tensor(level.scores).log_softmax(-1)).tolist()[: budget.branch] for level in levels]
    tokens: list[int] = []
    parents: list[int] = []
    # Cost of the path, cost of the path above, rank, depth, row of the parent.
    heap = [(costs[0][0], 0.0, 0, 0, 0)] if costs and budget.nodes else []
    while heap and len(tokens) < budget.nodes:
        cost, above, rank, depth, parent = heappop(heap)
        tokens.append(levels[depth].tokens[rank])
        parents.append(parent)
        if rank + 1 < len(costs[depth]):
            heappush(heap, (above + costs[depth][rank + 1], above, rank + 1, depth, parent))
        if depth + 1 < len(levels):
            heappush(heap, (cost + costs[depth + 1][0], cost, 0, depth + 1, len(tokens)))
    return Draft(tuple(tokens), tuple(parents))


def _drawn(sampler: Sampler, budget: Tree, logits: Tensor) -> Draft:
    """Level by level, every parent's children drawn from the same row with noise of their own."""
    nodes, chosen = Drawn(budget), [ROOT]
    for row in logits:
        first = len(nodes.tokens)
        rows = row.expand(len(chosen), -1)
        ranked = sampler.rank(rows, [nodes.path(node) for node in chosen], budget.branch)
        for parent, best in zip(chosen, ranked, strict=True):
            nodes.grow(parent, best)
        chosen = nodes.level(first)
    return nodes.draft()
