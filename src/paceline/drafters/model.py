"""A small model that drafts for a large one: chains and trees, over a cache of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from paceline.drafters.growth import Growing, Growth, pack_level
from paceline.protocols import Ask, Saved, Target
from paceline.sampling.sampler import Ranked
from paceline.types import Draft, DraftBudget, Tap, Verdict, Want
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix

SHARED = 32
"""Requests catch up in one pass while none has more tokens to feed than this; more go ahead in chunks of their own,
because everybody's rows are padded to the longest."""


@dataclass(slots=True)
class _ModelSlot:
    """`own`: the slot in the draft model's cache. `text`: all that is known, of which the cache holds a prefix."""

    own: int
    text: list[int]


@dataclass(frozen=True, slots=True)
class SavedText(Saved):
    """The keys and values of the first `length` of these tokens, which are the draft model's own."""

    tokens: tuple[int, ...]
    cache: Saved


class DraftModel(Growing):
    """Drafts with any `Target` of the same vocabulary, which may live on another device in another dtype."""

    draft = DraftBudget.chain(5)

    def __init__(self, model: Target, vocab_size: int) -> None:
        """`vocab_size`: the target's; a padded draft vocabulary is cut to it."""
        self._model, self._vocab = model, vocab_size
        self._cache = model.new_cache()
        self._slots: dict[int, _ModelSlot] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._slots[slot] = _ModelSlot(self._cache.acquire(len(prompt)), list(prompt))

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._slots[slot].text += verdict.tokens

    def save(self, slot: int) -> SavedText | None:
        state = self._slots[slot]
        kept = self._cache.save(state.own)
        tokens = tuple(state.text[: kept.length])
        return SavedText(kept.length, kept.tensors, tokens, kept) if tokens else None

    def load(self, slot: int, saved: SavedText, length: int) -> None:
        """It reads tokens and nothing else, so that its own decide how far the two texts are one."""
        state = self._slots[slot]
        most = max(0, min(length, len(saved.tokens), len(state.text) - 1))
        same = next((i for i in range(most) if saved.tokens[i] != state.text[i]), most)
        self._cache.load(state.own, saved.cache, same)

    def release(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state:
            self._cache.release(state.own)

    def limit(self, ask: Ask) -> DraftBudget:
        return ask.budget.within(self._model.context_length - len(self._slots[ask.slot].text))

    def roots(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        rest = [self._ahead(state) for state in states]
        slots = [state.own for state in states]
        lengths = [self._cache.lengths[slot] for slot in slots]
        drafts = [Draft.chain(tokens[1:]) for tokens in rest]
        rows = pack([tokens[0] for tokens in rest], drafts, slots, lengths, self._model.device)
        # The head is spared all rows but the last where that is everybody's.
        level = all(len(tokens) == rows.tokens.shape[1] for tokens in rest)
        logits = self._model.forward(rows, self._cache, Want("last" if level else "all")).logits
        self._cache.commit(rows, [range(1, len(tokens)) for tokens in rest])
        return [line[-1:] if level else line[len(tokens) - 1 :][:1] for line, tokens in zip(logits, rest, strict=True)]

    def _ahead(self, state: _ModelSlot) -> list[int]:
        """What is known and not yet cached, the pending token at least; a long text is fed here, up to that one."""
        # Asked again before anything was observed, it feeds the pending token again.
        self._cache.truncate(state.own, min(self._cache.lengths[state.own], len(state.text) - 1))
        while len(state.text) - (done := self._cache.lengths[state.own]) > SHARED:
            chunk = state.text[done : min(done + PREFILL_ROWS, len(state.text) - 1)]
            rows = pack_prefix(chunk, state.own, done, self._model.device)
            self._model.forward(rows, self._cache, Want("none"))
            self._cache.commit(rows, [range(1, len(chunk))])
        return state.text[self._cache.lengths[state.own] :]

    def level(self, growths: Sequence[Growth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        lengths = [len(state.text) for state in states]
        rows = pack_level(growths, [state.own for state in states], lengths, self._model.device)
        logits = self._model.forward(rows, self._cache, Want()).logits
        return [line[: len(growth.chosen)] for line, growth in zip(logits, growths, strict=True)]

    def rank(self, growth: Growth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """Cut or padded to the target's vocabulary."""
        logits = pad(logits, (0, self._vocab - logits.shape[-1]), value=-math.inf)
        return super().rank(growth, logits, paths, count)
