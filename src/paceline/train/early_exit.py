"""The recipe of an early exit: what stands between the target's layer E and its output head (Kangaroo, arXiv
2404.18911; the "tuned lens" of arXiv 2303.08112).

Drafting runs the target's own first layers on every drafted token, so there is one step to learn: what the whole target
would say after a token, from the stream that leaves layer E there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads import ExitConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.network import Norm
from paceline.train.recipe import Answered, Guesses, GuessTally, Recipe, Teacher, take
from paceline.train.states import DocumentBatch


class ExitAdapter(nn.Module):
    """x + up(down(x)), then a norm; parameters named as in `models/heads.py`."""

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
    """Cross-entropy against the target's distribution after the same token."""

    module: ExitAdapter

    def __init__(
        self, config: ExitConfig, target: EmbeddingAndHead, vocabulary: Tensor, steps: int, eps: float
    ) -> None:
        """`vocabulary` [K]: the ids, ascending, over which distributions are compared. `eps`: of the norm."""
        self.taps, self.steps = (config.layers,), steps
        self.module = ExitAdapter(config, eps)
        self._config = config
        self._teacher = Teacher(target, vocabulary)
        with torch.no_grad():
            self.module.norm.weight.fill_(1 / (self._teacher.kept.std() * config.hidden**0.5))

    @property
    def config(self) -> ExitConfig:
        return self._config

    def guess(self, batch: DocumentBatch) -> Guesses:
        answered = Answered.of(batch, self.steps)
        taught = self._teacher.of(batch, answered, exact=not self.module.training)
        states = take(batch.states[self._config.layers], answered.pending)[answered.real[0]].float()
        tally = GuessTally(self._teacher, taught, answered, 1.0)
        tally.once(F.linear(self.module(states), self._teacher.kept))
        return tally.guesses()
