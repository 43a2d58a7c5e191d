"""Medusa's recipe (arXiv 2401.10774): each head guesses one place further ahead from the same state of the target.

Head s sees the "final" state of the token before the pending one, and guesses the token s + 1 places after the pending
one. All of them end in the target's own output head, which stays as it is ("Medusa-1").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.shapes import Accuracy, best
from paceline.models.heads import MedusaConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.recipe import DraftPlaces, Guesses, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch
from paceline.types import DraftBudget

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


class Blocks(nn.Module):
    """Blocks of all heads, with parameters named as in `models/heads.py`."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_ResidualBlocks(config.hidden, config.layers) for _ in range(config.heads)])


class MedusaRecipe(Recipe):
    """Recipe of Medusa heads."""

    config: MedusaConfig
    module: Blocks

    def __init__(self, config: MedusaConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        super().__init__(config, Blocks(config), target, vocabulary, (), config.heads)

    def evaluated(self, guesses: Sequence[Guesses]) -> None:
        """Put the tree that would have accepted the most of the held-out texts into the config."""
        accuracy = Accuracy()
        for part in guesses:
            assert part.ranks is not None
            for ranks, real in zip(part.ranks.flatten(1).T.tolist(), part.real.flatten(1).T.tolist(), strict=True):
                accuracy.add(ranks, [_TREE.branch if there else 0 for there in real])
        shape = best(accuracy.chances(), _TREE.within(self.config.heads))
        self.config = replace(self.config, paths=shape.places)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states["final"], places.pending - 1).float()
        for block, real in zip(self.module.blocks, places.real, strict=True):
            tally.add(F.linear(block(states[real]), self.teacher.rows))
