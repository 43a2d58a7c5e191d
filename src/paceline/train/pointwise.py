"""Recipes of drafters that work on single states of the target and end in its own output head: Medusa, early exit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.independent import Chance, best
from paceline.models.heads import ExitConfig, MedusaConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import Norm
from paceline.train.recipe import DraftPlaces, Guesses, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch
from paceline.types import DraftBudget
from paceline.verify.tree import Place

_TREE = DraftBudget(64, 8, 10)
"""Budget of the tree that is searched for; drafting uses its best places, as many as its own budget allows."""


class _ResidualBlocks(nn.Module):
    """Residual SiLU blocks. At zero they pass the state on, and with it the target's guess of the next token."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


@dataclass(slots=True)
class Accuracy:
    """Acceptance by place of a tree. `tried`: how often a place was drafted and the one above it accepted; `accepted`:
    how often it was then accepted too. Neither depends on what else was drafted."""

    tried: Counter[Place] = field(default_factory=Counter)
    accepted: Counter[Place] = field(default_factory=Counter)

    def add(self, ranks: Sequence[int], widths: Sequence[int]) -> None:
        """Count one path: at each depth the rank of the target's token, among `widths` candidates.

        A rank beyond them is a miss, and nothing below a miss is counted.
        """
        place: Place = ()
        for rank, width in zip(ranks, widths, strict=True):
            self.tried.update((*place, other) for other in range(width))
            if rank >= width:
                break
            place = (*place, rank)
            self.accepted[place] += 1

    def chances(self, doubt: float = 20.0) -> Chance:
        """Return the measured acceptance of each place, smoothed by `doubt` (> 0) rounds with the average of its
        depth and rank. 0 for depths and ranks that were never tried."""
        tried, accepted = (_together(counts) for counts in (self.tried, self.accepted))

        def chance(place: Place) -> float:
            kind = len(place), place[-1]
            usual = accepted[kind] / tried[kind] if tried[kind] else 0.0
            return (self.accepted[place] + doubt * usual) / (self.tried[place] + doubt)

        return chance


def _together(counts: Mapping[Place, int]) -> Counter[tuple[int, int]]:
    """Return the sums by depth and rank."""
    sums: Counter[tuple[int, int]] = Counter()
    for place, count in counts.items():
        sums[len(place), place[-1]] += count
    return sums


class MedusaRecipe(Recipe):
    """Recipe of Medusa heads (arXiv 2401.10774): each guesses one place further ahead from the same state.

    Head s sees the "final" state of the token before the pending one, and guesses the token s + 1 places after the
    pending one. The output head stays as it is ("Medusa-1").
    """

    config: MedusaConfig
    module: nn.ModuleDict

    def __init__(self, config: MedusaConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        heads = nn.ModuleList(_ResidualBlocks(config.hidden, config.layers) for _ in range(config.heads))
        super().__init__(config, nn.ModuleDict({"blocks": heads}), target, vocabulary, config.heads)

    def evaluated(self, guesses: Sequence[Guesses]) -> None:
        """Put the tree that would have accepted the most of the held-out texts into the config."""
        accuracy = Accuracy()
        for part in guesses:
            assert part.ranks is not None
            for ranks, real in zip(part.ranks.flatten(1).T.tolist(), part.real.flatten(1).T.tolist(), strict=True):
                accuracy.add(ranks, [_TREE.branch if there else 0 for there in real])
        paths = best(accuracy.chances(), _TREE.within(self.config.heads))
        self.config = replace(self.config, paths=paths)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states["final"], places.pending - 1).float()
        heads: nn.ModuleList = self.module["blocks"]  # type: ignore[assignment]
        rows = tally.rows(self.teacher.rows)
        for head, real in zip(heads, places.real, strict=True):
            tally.add(F.linear(head(states[real]), rows))


class ExitProjection(nn.Module):
    """Residual projection x + up(down(x)), then a norm; parameters named as in `models/heads.py`."""

    def __init__(self, config: ExitConfig, eps: float) -> None:
        super().__init__()
        self.proj = nn.ModuleDict(
            {
                "down": nn.Linear(config.hidden, config.rank, bias=False),
                "up": nn.Linear(config.rank, config.hidden, bias=False),
            }
        )
        nn.init.zeros_(self.proj["up"].weight)  # type: ignore[arg-type]
        self.norm = Norm(config.hidden, eps)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.proj["up"](self.proj["down"](x)))
        return y


class EarlyExitRecipe(Recipe):
    """Recipe of an early exit: a projection between the target's layer E and its output head (the adapter of Kangaroo,
    arXiv 2404.18911; the "tuned lens" of arXiv 2303.08112).

    Drafting runs the target's own first layers on every drafted token, so there is one step to learn: the whole
    target's distribution after a token, from the residual stream that leaves layer E there. The later steps of a draft
    are first steps of the places after it.
    """

    config: ExitConfig
    module: ExitProjection
    decay = 1.0

    def __init__(
        self, config: ExitConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int, eps: float
    ) -> None:
        """`eps`: of the norm."""
        super().__init__(config, ExitProjection(config, eps), target, vocabulary, steps)
        self.start_at_unit_logits(self.module.norm)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states[self.config.layers], places.pending)[places.real[0]].float()
        tally.add_single_step(F.linear(self.module(states), tally.rows(self.teacher.rows)))
