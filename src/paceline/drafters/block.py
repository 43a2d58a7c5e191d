"""A block drafter (DFlash 1 and 2, DSpark): one pass drafts several tokens. See `models/block.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.drafters.base import Ask
from paceline.drafters.cached import CachedSlot, StateDrafter
from paceline.drafters.independent import draft_independently
from paceline.drafters.markov import BlockTrees
from paceline.errors import CorruptModel
from paceline.models.block import BlockNetwork
from paceline.models.heads import BlockConfig
from paceline.protocols import TargetWithHead
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import PREFILL_ROWS


class Block(StateDrafter[CachedSlot]):
    """Drafts a block of tokens with a head that attends to the target's hidden states of the whole text.

    The head caches the keys and values of these states, but never the keys and values of a drafted block. Before it
    drafts, it reads the pending states of all requests in one pass.
    """

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], target: TargetWithHead) -> None:
        """Make a drafter.

        Args:
            config: Sizes of the head.
            tensors: Weights, under the names of `models/heads.py`.
            target: The target that the head was trained for.

        Raises:
            CorruptModel: If the head does not fit the target or its config is invalid.
        """
        _check(config, target.vocab_size)
        self._host = target
        self._mask = target.embed(torch.tensor([config.mask_token], device=target.device))
        if self._mask.shape[-1] != config.layer.hidden:
            raise CorruptModel(
                f"the block drafter has hidden size {config.layer.hidden}, but its target has {self._mask.shape[-1]}",
                "Use the drafter that was trained for this target",
            )
        self._config, self.taps = config, config.taps
        self.draft = DraftBudget.chain(config.depth)
        self._network = BlockNetwork(config, tensors, target)
        super().__init__(self._network.new_cache(), CachedSlot)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        budgets = [ask.budget.within(self._config.depth) for ask in asks]
        busy = [i for i, budget in enumerate(budgets) if budget.nodes]
        drafts = [Draft()] * len(asks)
        if busy:
            made = self._drafts([asks[i] for i in busy], [budgets[i] for i in busy])
            for i, draft in zip(busy, made, strict=True):
                drafts[i] = draft
        return drafts

    @torch.inference_mode()
    def _drafts(self, asks: Sequence[Ask], budgets: Sequence[DraftBudget]) -> list[Draft]:
        network, states = self._network, self._read(asks, max(budget.depth for budget in budgets))
        if self._config.markov or self._config.selector:
            return BlockTrees(network, asks, states).drafts(asks, budgets)
        guesses = zip(asks, budgets, network.logits(states), strict=True)
        return [draft_independently(ask, budget, guess, network.subset) for ask, budget, guess in guesses]

    def _read(self, asks: Sequence[Ask], depth: int) -> Tensor:
        """Return the states [B, depth, H] that predict the tokens after the pending ones: the input of
        `BlockNetwork.logits`."""
        states = [self._slots[ask.slot] for ask in asks]
        self._catch_up(states)
        last = self._host.embed(torch.tensor([[ask.last] for ask in asks], device=self._mask.device))
        x = torch.cat([last, self._mask.expand(len(asks), self._config.size - 1, -1)], 1)
        x = self._network.draft(self._cache, [state.cache_slot for state in states], [ask.position for ask in asks], x)
        first = self._config.size - self._config.depth
        return x[:, first : first + depth]

    def _read_pending(self, state: CachedSlot) -> None:
        # Read all pending states, because they take several times as much memory as the keys and values that are
        # computed from them.
        self._catch_up([state])

    @torch.inference_mode()
    def _catch_up(self, states: Sequence[CachedSlot]) -> None:
        """Read all pending states into the cache, in passes that are short enough for the ring of a sliding window."""
        while late := [state for state in states if len(state.pending)]:
            parts = [state.pending.take(PREFILL_ROWS) for state in late]
            features = pad_sequence(parts, batch_first=True)
            self._network.read(
                self._cache, [state.cache_slot for state in late], features, [len(part) for part in parts]
            )


def _check(config: BlockConfig, vocab_size: int) -> None:
    wrong = {
        f"it drafts {config.depth} tokens": config.depth < 1,
        f"its mask token is {config.mask_token}, but the vocabulary has {vocab_size} tokens": not 0
        <= config.mask_token
        < vocab_size,
        f"it has {len(config.causal)} causal flags for {config.layer.layers} layers": len(config.causal)
        not in (0, config.layer.layers),
        "it taps no layer": not config.taps,
    }
    for cause, found in wrong.items():
        if found:
            raise CorruptModel(f"the block drafter's config is invalid: {cause}", "Download the drafter again")
