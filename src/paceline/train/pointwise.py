"""Recipes of drafters that read single states of the target and use its output head: Medusa and early exit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.independent import AcceptanceProbability, best_tree
from paceline.models.heads import ExitConfig, MedusaConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import Norm
from paceline.train.recipe import DraftPlaces, Guesses, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch
from paceline.types import DraftBudget
from paceline.verify.tree import Place

_TREE = DraftBudget(64, 8, 10)
"""Budget of the tree to search for. Drafting later uses its best places, as many as the draft budget allows."""


class _ResidualBlocks(nn.Module):
    """Residual SiLU blocks. With zero weights they pass the state on unchanged, so training starts from the target's
    guess."""

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
    """Acceptance of each place in a tree. The counts do not depend on the other places that were drafted.

    Attributes:
        tried: How often a place was drafted and its parent was accepted.
        accepted: How often the place was then accepted too.
    """

    tried: Counter[Place] = field(default_factory=Counter)
    accepted: Counter[Place] = field(default_factory=Counter)

    def add(self, ranks: Sequence[int], widths: Sequence[int]) -> None:
        """Count one path. Depths below the first miss are not counted.

        Args:
            ranks: Rank of the target's token at each depth.
            widths: Number of candidates at each depth. A rank that is not lower is a miss.
        """
        place: Place = ()
        for rank, width in zip(ranks, widths, strict=True):
            self.tried.update((*place, other) for other in range(width))
            if rank >= width:
                break
            place = (*place, rank)
            self.accepted[place] += 1

    def chances(self, doubt: float = 20.0) -> AcceptanceProbability:
        """Return the measured acceptance rate of each place.

        It is smoothed with `doubt` > 0 rounds at the average rate of its depth and rank. The rate is 0 if that depth
        and rank was never tried.
        """
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
    """Recipe of Medusa heads (arXiv 2401.10774). Each head guesses one place further ahead from the same state.

    Head s sees the "final" state of the token before the pending token, and guesses the token s + 1 places after the
    pending token. The output head is not trained ("Medusa-1").
    """

    config: MedusaConfig
    module: nn.ModuleDict

    def __init__(self, config: MedusaConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        heads = nn.ModuleList(_ResidualBlocks(config.hidden, config.layers) for _ in range(config.heads))
        super().__init__(config, nn.ModuleDict({"blocks": heads}), target, vocabulary, config.heads)

    def evaluated(self, guesses: Sequence[Guesses]) -> None:
        """Store in the config the tree that would have accepted the most tokens of the held-out texts."""
        accuracy = Accuracy()
        for part in guesses:
            assert part.ranks is not None
            for ranks, real in zip(part.ranks.flatten(1).T.tolist(), part.real.flatten(1).T.tolist(), strict=True):
                accuracy.add(ranks, [_TREE.branch if there else 0 for there in real])
        paths = best_tree(accuracy.chances(), _TREE.within(self.config.heads))
        self.config = replace(self.config, paths=paths)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states["final"], places.pending - 1).float()
        heads: nn.ModuleList = self.module["blocks"]  # type: ignore[assignment]
        rows = tally.rows(self.teacher.rows)
        for head, real in zip(heads, places.real, strict=True):
            tally.add(F.linear(head(states[real]), rows))


class ExitProjection(nn.Module):
    """Residual projection x + up(down(x)), then a norm. Parameters are named as in `models/heads.py`."""

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
    """Recipe of an early exit: a projection between the target's layer E and its output head.

    This is the adapter of Kangaroo (arXiv 2404.18911) and the "tuned lens" of arXiv 2303.08112. Drafting runs the
    target's first layers on every drafted token, so there is only one step to learn: from the residual stream after
    layer E, predict the whole target's distribution of the next token. A later step of a draft equals the first step at
    a later place.
    """

    config: ExitConfig
    module: ExitProjection
    decay = 1.0

    def __init__(
        self, config: ExitConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int, eps: float
    ) -> None:
        """Build the projection. `eps` is the epsilon of its norm."""
        super().__init__(config, ExitProjection(config, eps), target, vocabulary, steps)
        self.start_at_unit_logits(self.module.norm)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states[self.config.layers], places.pending)[places.real[0]].float()
        tally.add_single_step(F.linear(self.module(states), tally.rows(self.teacher.rows)))
