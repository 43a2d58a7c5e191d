"""Recipe of an early exit: an adapter between the target's layer E and its output head (Kangaroo, arXiv 2404.18911;
the "tuned lens" of arXiv 2303.08112).

Drafting runs the target's own first layers on every drafted token, so there is one step to learn: the whole target's
distribution after a token, from the residual stream that leaves layer E there.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads import ExitConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import Norm
from paceline.train.recipe import DraftPlaces, GuessTally, Recipe, gather
from paceline.train.states import DocumentBatch


class ExitAdapter(nn.Module):
    """Residual adapter x + up(down(x)), then a norm; parameters named as in `models/heads.py`."""

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
    """Recipe of an early exit. It has one step: the later steps of a draft are first steps of the places after it."""

    config: ExitConfig
    module: ExitAdapter
    decay = 1.0

    def __init__(
        self, config: ExitConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int, eps: float
    ) -> None:
        """`eps`: of the norm."""
        super().__init__(config, ExitAdapter(config, eps), target, vocabulary, (config.layers,), steps)
        self.start_at_unit_logits(self.module.norm)

    def draft(self, batch: DocumentBatch, places: DraftPlaces, tally: GuessTally) -> None:
        states = gather(batch.states[self.config.layers], places.pending)[places.real[0]].float()
        tally.add_single_step(F.linear(self.module(states), self.teacher.rows))
