"""Medusa: heads that predict several tokens in one pass from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.hosted import LastState
from paceline.drafters.independent import fixed_tree, rank_by_depth
from paceline.kernels.linear import memory_bound_rows
from paceline.models.heads import MedusaConfig
from paceline.models.medusa import MedusaHeads
from paceline.protocols import TargetWithHead
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import places

_UNLIMITED = DraftBudget(512, 512, 1 << 20)
"""A budget that no tree exceeds."""


class Medusa(LastState):
    """Drafts with Medusa heads (arXiv 2401.10774). Head i predicts depth i + 1, independently of the nodes above.

    The tree has a fixed shape: `config.paths`, with the best places first, or the default of `tree.places`. A smaller
    budget keeps the first places. All places at the same depth take their tokens from the ranking of one head (see
    `independent.rank_by_depth`).
    """

    def __init__(self, config: MedusaConfig, tensors: Mapping[str, Tensor], target: TargetWithHead) -> None:
        """Make a drafter.

        Args:
            config: Sizes of the heads.
            tensors: Weights, under the names of `models/heads.py`.
            target: The target that the heads were trained for.

        Raises:
            CorruptModel: If tensors are missing or do not fit the target.
            UnsupportedModel: If the target does not expose its output head.
        """
        self._heads, self._depth, self._order = MedusaHeads(config, tensors, target), config.heads, config.paths
        self.draft = DraftBudget(15, config.heads, 4)
        if kept := places(_UNLIMITED.within(config.heads), config.paths) if config.paths else ():
            whole = DraftBudget(len(kept), max(map(len, kept)), max(map(max, kept)) + 1)
            # Keep the best places, which come first, up to the number of rows that a memory-bound pass verifies at
            # almost no cost. Beyond that number, another row costs more than it gains.
            self.draft = whole.within(whole.depth, memory_bound_rows(target.device) - 1)
        super().__init__()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        shapes = [fixed_tree(ask.budget.within(self._depth), self._order, ask.draws) for ask in asks]
        # A prompt of one token has no prefill, so there is no hidden state to draft from.
        able = [i for i, ask in enumerate(asks) if ask.slot in self._states and shapes[i].widths]
        drafts = [Draft()] * len(asks)
        if not able:
            return drafts
        deepest = max(len(shapes[i].widths) for i in able)
        logits = self._logits([asks[i].slot for i in able], deepest)
        for line, i in enumerate(able):
            drafts[i] = shapes[i].draft(rank_by_depth(asks[i], logits[:, line], shapes[i].widths))
        return drafts

    @torch.inference_mode()
    def _logits(self, slots: Sequence[int], heads: int) -> Tensor:
        """Return logits [heads, R, V] on the host, from one pass for all slots."""
        states = torch.stack([self._states[slot] for slot in slots])
        return self._heads.logits(self._heads.states(states, heads)).cpu()
