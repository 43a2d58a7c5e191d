"""Trees from block drafters whose predictions also depend on the previous token (DSpark, DFlash 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, TreeGrowth, grow_trees
from paceline.models.block import BlockNetwork
from paceline.sampling.sampler import Ranked
from paceline.types import Draft, DraftBudget

_MIN_CONFIDENCE = 1e-6
"""Lower bound for the probability from a confidence head. It keeps the logarithm finite."""


class BlockTrees:
    """Grows the drafts of a round from the results of a single pass. Each level then costs only a small matrix
    multiplication.

    A confidence head estimates the probability that the best token at a depth is accepted. This estimate replaces the
    token's own probability, and the scores of its siblings are shifted by the same amount. A chain therefore ends where
    the confidence head expects a rejection.
    """

    def __init__(self, network: BlockNetwork, asks: Sequence[Ask], states: Tensor) -> None:
        """Begin the drafts of a round.

        Args:
            network: The block drafter's network.
            asks: The requests for drafts.
            states: Hidden states [B, depth, H] that predict the tokens after the pending token of each request.
        """
        self._network = network
        self._states = {ask.slot: line for ask, line in zip(asks, states, strict=True)}
        self._logits = {ask.slot: line for ask, line in zip(asks, network.logits(states), strict=True)}
        self._confidence: dict[int, list[float]] = {}

    def drafts(self, asks: Sequence[Ask], budgets: Sequence[DraftBudget]) -> list[Draft]:
        growths = [TreeGrowth.begin(ask, budget) for ask, budget in zip(asks, budgets, strict=True)]
        grow_trees(growths, self._level, self._level, self._rank)
        return [growth.nodes.draft() for growth in growths]

    def _level(self, growths: Sequence[TreeGrowth]) -> list[Tensor]:
        """Return the logits [len(chosen), C] after the chosen nodes of each tree."""
        return [self._logits_after(growth) for growth in growths]

    def _logits_after(self, growth: TreeGrowth) -> Tensor:
        slot, nodes, first = growth.ask.slot, growth.nodes, growth.chosen[0]
        depth = 0 if first == ROOT else nodes.depths[first]
        tokens = [growth.ask.last if node == ROOT else nodes.tokens[node] for node in growth.chosen]
        logits, sure = self._network.follow(tokens, self._states[slot][depth], self._logits[slot][depth])
        self._confidence[slot] = [] if sure is None else sure.clamp(_MIN_CONFIDENCE).tolist()
        return logits

    def _rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        ranked = growth.ask.rank(logits, paths, count, self._network.subset)
        sure = self._confidence[growth.ask.slot]
        if growth.ask.draws or not sure:
            return ranked
        return [_shift_scores(one, math.log(share)) for one, share in zip(ranked, sure, strict=True)]


def _shift_scores(ranked: Ranked, best: float) -> Ranked:
    """Return the candidates with all scores shifted by the same amount, so that the first score is `best`."""
    return replace(ranked, scores=[score - ranked.scores[0] + best for score in ranked.scores])
