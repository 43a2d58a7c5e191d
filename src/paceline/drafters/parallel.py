"""P-EAGLE: an EAGLE-3 head that drafts several tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.eagle import Eagle
from paceline.drafters.growth import TreeGrowth, logits_of
from paceline.drafters.independent import draft_independently
from paceline.types import Draft
from paceline.verify.tree import pack

_DEPTH = 8
"""Number of tokens ahead that these heads are trained to predict (`num_depths` in speculators)."""


class ParallelEagle(Eagle):
    """Drafts with mask rows after the newest row of an EAGLE-3 head's cache.

    A mask row has the mask token and a learned state, in place of a token and features that are not known yet. It also
    attends to the mask rows before it, and predicts one token further ahead than the row before it. Mask rows are not
    kept in the cache.

    Source: speculators, `models/peagle/`.
    """

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        growths = [TreeGrowth.begin(ask, self.limit(ask).within(_DEPTH)) for ask in asks]
        busy = [growth for growth in growths if growth.nodes.budget.nodes]
        guesses = dict(zip((growth.ask.slot for growth in busy), self._guess(busy), strict=True)) if busy else {}
        return [
            draft_independently(growth.ask, growth.nodes.budget, guesses[growth.ask.slot], self._net.subset)
            if growth.ask.slot in guesses
            else Draft()
            for growth in growths
        ]

    def _guess(self, growths: Sequence[TreeGrowth]) -> list[Tensor]:
        """Return, for each request, the logits [depth, C] of the tokens after its pending token."""
        first = self.roots(growths)
        more = max(growth.nodes.budget.depth for growth in growths) - 1
        if not more or self._net.mask is None:
            return list(first)
        token, state = self._net.mask
        slots = [self._slots[growth.ask.slot].cache_slot for growth in growths]
        lengths = [self._cache.lengths[slot] for slot in slots]
        drafts = [Draft.chain([token] * (more - 1))] * len(slots)
        rows = pack([token] * len(slots), drafts, slots, lengths, self._device)
        hidden = self._net.fuse(state).expand(*rows.tokens.shape, -1)
        _, outs = self._net.step(rows, hidden, self._cache)
        ahead = logits_of(outs, rows.counts, self._net.logits)
        return [torch.cat(both) for both in zip(first, ahead, strict=True)]
