"""The Gemma 4 assistant: a few layers that draft over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.cache.slab import SlabCache
from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, TreeDrafter, TreeGrowth, head_budget, logits_of, without_drawn_siblings
from paceline.drafters.hosted import CacheSharing, LastState
from paceline.errors import UnsupportedModel
from paceline.models.assistant import AssistantNetwork
from paceline.models.decoder import Decoder
from paceline.models.heads import AssistantConfig
from paceline.protocols import Target
from paceline.types import DraftBudget
from paceline.verify.tree import MIN_ROWS


class Assistant(CacheSharing, LastState, TreeDrafter):
    """Drafts with a Gemma 4 assistant for the target that it was trained for.

    The input of a row is a token and the hidden state before it. At every depth, a row attends only to the target's
    committed text, and has the position of the pending token, as in training. So the assistant needs no cache of its
    own, never has a backlog, and never has to undo a rejected draft.

    Source: Google's Gemma 4 assistants, as in transformers (`SinglePositionMultiTokenCandidateGenerator`).
    """

    def __init__(self, config: AssistantConfig, tensors: Mapping[str, Tensor], target: Target) -> None:
        """Make a drafter.

        Args:
            config: Sizes of the assistant.
            tensors: Weights, under the names of `models/heads.py`.
            target: The target. It must be a model that Paceline runs itself.

        Raises:
            CorruptModel: If tensors are missing or have the wrong shape.
            UnsupportedModel: If the target does not share its keys and values.
        """
        if not isinstance(target, Decoder):
            raise UnsupportedModel(
                f"{type(target).__name__} does not share its keys and values, which an assistant needs",
                "Use a Gemma 4 model that Paceline runs itself, or another drafter",
            )
        self.draft = head_budget(target.device)
        self._net, self._device = AssistantNetwork(config, tensors, target), target.device
        self._after: dict[int, dict[int, Tensor]] = {}
        """Slot -> node fed in this round, or `ROOT` for the pending token -> the state [target H] that the assistant
        predicts after it."""
        super().__init__()

    def limit(self, ask: Ask) -> DraftBudget:
        """Return the ask's budget, or an empty budget if there is no state yet."""
        return without_drawn_siblings(ask) if ask.slot in self._states and ask.position else DraftBudget.chain(0)

    def roots(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        self._after = {growth.ask.slot: {} for growth in growths}
        return self._step(growths, [[growth.ask.last] for growth in growths])

    def level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        return self._step(growths, [[growth.nodes.tokens[node] for node in growth.chosen] for growth in growths])

    @torch.inference_mode()
    def _step(self, growths: Sequence[TreeGrowth], tokens: Sequence[list[int]]) -> Sequence[Tensor]:
        """Feed the chosen nodes of each tree, with these tokens. Return the logits [nodes, V] of each tree."""
        cache = self.target_cache
        assert isinstance(cache, SlabCache)  # every `Decoder` has one
        counts, room = [len(line) for line in tokens], max(-(-MIN_ROWS // len(growths)), *map(len, tokens))
        before = [torch.stack([self._before(growth, node) for node in growth.chosen]) for growth in growths]
        hidden = pad_sequence([torch.cat([x, x[:1].expand(room - len(x), -1)]) for x in before], batch_first=True)
        rows = torch.tensor([[*line, *line[:1] * (room - len(line))] for line in tokens], device=self._device)
        states, after = self._net.step(rows, hidden, cache, [growth.ask.slot for growth in growths])
        for growth, line in zip(growths, after, strict=True):
            self._after[growth.ask.slot] |= dict(zip(growth.chosen, line, strict=False))
        return logits_of(states, counts, self._net.logits)

    def _before(self, growth: TreeGrowth, node: int) -> Tensor:
        """Return the state [target H] before a node's token."""
        slot = growth.ask.slot
        return self._states[slot] if node == ROOT else self._after[slot][growth.nodes.parents[node]]
