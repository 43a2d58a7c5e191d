"""Medusa's recipe (arXiv 2401.10774): every head guesses further ahead from one state of the target.

Head s sees the "final" state of the token before the pending one, and guesses the token s + 1 places after the pending
one. The target's own output head stands behind all of them and stays as it is ("Medusa-1").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.shapes import Accuracy, best
from paceline.models.heads import HeadFile, MedusaConfig
from paceline.protocols import EmbeddingAndHead
from paceline.train.recipe import Answered, Guesses, GuessTally, Recipe, Teacher, take
from paceline.train.states import DocumentBatch
from paceline.types import DraftBudget

_DECAY = 0.8
"""As in the published recipe: what lies further ahead is less often asked for."""


_TREE = DraftBudget(64, 8, 10)
"""The largest tree that is looked for; what is drafted are its best places, as many as there is room for."""


class _ResidualBlocks(nn.Module):
    """Residual SiLU blocks. At zero they pass on the state, and with it what the target says of the next token."""

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
    """Parameters named as in `models/heads.py`."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_ResidualBlocks(config.hidden, config.layers) for _ in range(config.heads)])


class MedusaRecipe(Recipe):
    """Cross-entropy of every head against the target's distribution at the token it guesses."""

    taps = ()
    module: Blocks

    def __init__(self, config: MedusaConfig, target: EmbeddingAndHead, vocabulary: Tensor) -> None:
        """`vocabulary` [K]: the ids, ascending, over which distributions are compared."""
        self.steps = config.heads
        self.module = Blocks(config)
        self._config = config
        self._teacher = Teacher(target, vocabulary)

    @property
    def config(self) -> MedusaConfig:
        return self._config

    def measured(self, looks: Sequence[Guesses]) -> None:
        """The tree that would have kept the most of the held-out texts goes into the config."""
        accuracy = Accuracy()
        for look in looks:
            assert look.ranks is not None
            for ranks, real in zip(look.ranks.flatten(1).T.tolist(), look.real.flatten(1).T.tolist(), strict=True):
                accuracy.add(ranks, [_TREE.branch if there else 0 for there in real])
        shape = best(accuracy.chances(), _TREE.within(self._config.heads))
        self._config = replace(self._config, paths=shape.places)

    def guess(self, batch: DocumentBatch) -> Guesses:
        answered = Answered.of(batch, self.steps)
        taught = self._teacher.of(batch, answered, exact=not self.module.training)
        states = take(batch.states["final"], answered.pending - 1).float()
        tally = GuessTally(self._teacher, taught, answered, _DECAY)
        for block, real in zip(self.module.blocks, answered.real, strict=True):
            tally.add(F.linear(block(states[real]), self._teacher.kept))
        return tally.guesses()


def shares(head: HeadFile) -> bool:
    """Whether these are Medusa heads that end in the target's own."""
    return isinstance(head.config, MedusaConfig) and head.config.shared


def with_heads(head: HeadFile, target: EmbeddingAndHead) -> HeadFile:
    """The same Medusa heads for programs that know no shared one: each with a copy of the target's, in bfloat16."""
    assert isinstance(head.config, MedusaConfig)
    copies = {f"lm_heads.{i}.weight": target.head().to(torch.bfloat16) for i in range(head.config.heads)}
    return replace(head, config=replace(head.config, shared=False), tensors=dict(head.tensors) | copies)
