"""A small model that drafts for a large one: chains and trees, over a cache of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from paceline.drafters.base import Ask
from paceline.drafters.cached import CachedDrafter, CachedSlot
from paceline.drafters.growth import Growing, Growth, pack_level
from paceline.protocols import Saved, Target
from paceline.sampling.sampler import Ranked, Subset
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import chunk_end, pack, pack_prefix

SHARED = 32
"""The most tokens per request that are fed in one pass with other requests; longer texts first go through passes of
their own, because all rows are padded to the longest."""


@dataclass(frozen=True, slots=True)
class SavedText(Saved):
    """The keys and values of the first `length` of these tokens, which are the draft model's own."""

    tokens: tuple[int, ...]
    cache: Saved


class DraftModel(CachedDrafter[CachedSlot], Growing):
    """Drafts with any `Target` of the same vocabulary, which may live on another device in another dtype."""

    draft = DraftBudget.chain(8)

    def __init__(self, model: Target, vocab_size: int, head_tokens: Tensor | None = None) -> None:
        """`vocab_size`: the target's; logits of a padded draft vocabulary are cut to it. `head_tokens`: the tokens
        below it that the model's logits are of, ascending; None: all."""
        self._model, self._vocab = model, vocab_size
        self._subset = None if head_tokens is None else Subset(head_tokens, vocab_size)
        super().__init__(model.new_cache(), CachedSlot)

    def save(self, slot: int) -> SavedText | None:
        state = self._slots[slot]
        kept = self._cache.save(state.cache_slot)
        tokens = tuple(state.token_ids[: kept.length])
        return SavedText(kept.length, kept.tensors, tokens, kept) if tokens else None

    def load(self, slot: int, saved: SavedText, length: int) -> None:
        """Load as many tokens as both texts share, by the draft model's own token ids."""
        state = self._slots[slot]
        most = max(0, min(length, len(saved.tokens), len(state.token_ids) - 1))
        same = next((i for i in range(most) if saved.tokens[i] != state.token_ids[i]), most)
        self._cache.load(state.cache_slot, saved.cache, same)

    def limit(self, ask: Ask) -> DraftBudget:
        return ask.budget.within(self._model.context_length - len(self._slots[ask.slot].token_ids))

    def roots(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        rest = [self._uncached(state) for state in states]
        slots = [state.cache_slot for state in states]
        lengths = [self._cache.lengths[slot] for slot in slots]
        drafts = [Draft.chain(tokens[1:]) for tokens in rest]
        rows = pack([tokens[0] for tokens in rest], drafts, slots, lengths, self._model.device)
        # The head computes the last row alone where all requests feed equally many.
        even = all(len(tokens) == rows.tokens.shape[1] for tokens in rest)
        logits = self._model.forward(rows, self._cache, Want("last" if even else "all")).logits
        self._cache.commit(rows, [range(1, len(tokens)) for tokens in rest])
        return [line[-1:] if even else line[len(tokens) - 1 :][:1] for line, tokens in zip(logits, rest, strict=True)]

    def _uncached(self, state: CachedSlot) -> list[int]:
        """Return the tokens that are not cached yet, the pending one at least. Most of a long text is fed here."""
        # If asked again before `observe`, feed the pending token again.
        self._cache.truncate(state.cache_slot, min(self._cache.lengths[state.cache_slot], len(state.token_ids) - 1))
        while len(state.token_ids) - (done := self._cache.lengths[state.cache_slot]) > SHARED:
            chunk = state.token_ids[done : min(chunk_end(done), len(state.token_ids) - 1)]
            rows = pack_prefix(chunk, state.cache_slot, done, self._model.device)
            self._model.forward(rows, self._cache, Want("none"))
            self._cache.commit(rows, [range(1, len(chunk))])
        return state.token_ids[self._cache.lengths[state.cache_slot] :]

    def level(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        lengths = [len(state.token_ids) for state in states]
        rows = pack_level(growths, [state.cache_slot for state in states], lengths, self._model.device)
        logits = self._model.forward(rows, self._cache, Want()).logits
        return [line[: len(growth.chosen)] for line, growth in zip(logits, growths, strict=True)]

    def rank(self, growth: Growth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """Cut or pad the logits to the target's vocabulary."""
        if self._subset is None:
            logits = pad(logits, (0, self._vocab - logits.shape[-1]), value=-math.inf)
        return growth.ask.rank(logits, paths, count, self._subset)
