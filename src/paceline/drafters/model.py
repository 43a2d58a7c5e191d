"""A draft model: a small model with its own cache that drafts chains and trees for a large one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from paceline.drafters.base import Ask
from paceline.drafters.cached import CachedDrafter, CachedSlot
from paceline.drafters.growth import TreeDrafter, TreeGrowth, pack_level, without_drawn_siblings
from paceline.protocols import Saved, Target, restored
from paceline.sampling.sampler import Ranked, Subset
from paceline.types import Draft, DraftBudget, Want
from paceline.verify.tree import chunk_end, pack, pack_prefix

MAX_SHARED_PASS = 32
"""Maximum number of tokens of a request in a pass with other requests. Longer texts are first fed in separate passes,
because all requests in a pass are padded to the longest one."""
MAX_READ = 128
"""Maximum number of tokens of a text that one round reads in a separate pass. It is limited, because all requests of
the round wait for that pass. Until the text has been read, it gets no drafts. With rules other than `match`, the whole
text is read in one round."""


@dataclass(frozen=True, slots=True)
class SavedText(Saved):
    """The keys and values of a text in the draft model's tokens. `cache` holds the first `length` tokens of
    `tokens`."""

    tokens: tuple[int, ...]
    cache: Saved


class DraftModel(CachedDrafter[CachedSlot], TreeDrafter):
    """Drafts with any `Target` that has the same vocabulary. Its device and dtype may differ from the target's."""

    # One pass scores all tokens, so siblings cost almost nothing to draft. Seven nodes and the pending token make eight
    # rows, which fill two tiles of the CPU kernels (docs/notes/drafters.md#trees-of-a-draft-model).
    draft = DraftBudget(nodes=7, depth=7, branch=3)

    def __init__(self, model: Target, vocab_size: int, head_tokens: Tensor | None = None) -> None:
        """Make a drafter.

        Args:
            model: The draft model.
            vocab_size: Size V of the target's vocabulary. Logits of a padded draft vocabulary are cut to it.
            head_tokens: The tokens below V that the columns of the draft model's logits stand for, in ascending order.
                None for all tokens.
        """
        self._model, self._vocab = model, vocab_size
        self._subset = None if head_tokens is None else Subset(head_tokens, vocab_size)
        super().__init__(model.new_cache(), CachedSlot)

    def save(self, slot: int) -> SavedText | None:
        state = self._slots[slot]
        kept = self._cache.save(state.cache_slot)
        tokens = tuple(state.token_ids[: kept.length])
        return SavedText(kept.length, kept.tensors, tokens, kept) if tokens else None

    def load(self, slot: int, saved: SavedText, length: int) -> None:
        """Load the common prefix of both texts, compared in the draft model's tokens."""
        state = self._slots[slot]
        most = max(0, min(length, len(saved.tokens), len(state.token_ids) - 1))
        same = next((i for i in range(most) if saved.tokens[i] != state.token_ids[i]), most)
        self._cache.load(state.cache_slot, saved.cache, same)

    def restored(self, saved: SavedText) -> SavedText:
        return replace(saved, cache=restored(self._cache, saved.cache))

    def limit(self, ask: Ask) -> DraftBudget:
        state = self._slots[ask.slot]
        budget = without_drawn_siblings(ask, self.draft).within(self._model.context_length - len(state.token_ids))
        # Some caches accept only chains.
        return budget.as_chain() if self._cache.fit(state.cache_slot, budget).branch == 1 else budget

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        unread = [self._catch_up(ask) for ask in asks]
        drafts = iter(super().propose([ask for ask, count in zip(asks, unread, strict=True) if not count]))
        return [Draft(unread=count) if count else next(drafts) for count in unread]

    def _catch_up(self, ask: Ask) -> int:
        """Read a part of the text if much of it is unread. Return the number of tokens that later rounds must read. It
        is 0 if this round can draft."""
        if not self.limit(ask).nodes:
            return 0
        state = self._slots[ask.slot]
        # If `propose` is called again before `observe`, feed the pending token again.
        self._cache.truncate(state.cache_slot, min(self._cache.lengths[state.cache_slot], len(state.token_ids) - 1))
        while len(self._uncached(state)) > MAX_SHARED_PASS:
            if not self._copy_prompt(state):
                self._read_prompt(state)
            # With other rules, the text depends on the drafts. So whether a round drafts must not depend on how much of
            # the text has been read before.
            if ask.sampler.rule == "match" and (left := len(self._uncached(state))) > MAX_SHARED_PASS:
                return left
        return 0

    def _read_prompt(self, state: CachedSlot) -> None:
        done = self._cache.lengths[state.cache_slot]
        chunk = state.token_ids[done : min(chunk_end(done, MAX_READ), len(state.token_ids) - 1)]
        rows = pack_prefix(chunk, state.cache_slot, done, self._model.device)
        self._model.forward(rows, self._cache, Want("none"))
        self._cache.commit(rows, [range(1, len(chunk))])

    def _uncached(self, state: CachedSlot) -> list[int]:
        """Return the tokens that are not cached yet. At least the pending token is among them."""
        return state.token_ids[self._cache.lengths[state.cache_slot] :]

    def roots(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        rest = [self._uncached(state) for state in states]
        slots = [state.cache_slot for state in states]
        lengths = [self._cache.lengths[slot] for slot in slots]
        drafts = [Draft.chain(tokens[1:]) for tokens in rest]
        rows = pack([tokens[0] for tokens in rest], drafts, slots, lengths, self._model.device)
        # If all requests feed the same number of tokens, the output head needs to compute only the last row.
        even = all(len(tokens) == rows.tokens.shape[1] for tokens in rest)
        logits = self._model.forward(rows, self._cache, Want("last" if even else "all")).logits
        self._cache.commit(rows, [range(1, len(tokens)) for tokens in rest])
        return [line[-1:] if even else line[len(tokens) - 1 :][:1] for line, tokens in zip(logits, rest, strict=True)]

    def _copy_prompt(self, state: CachedSlot) -> bool:
        """Copy keys and values from a request with the same prompt, so that only one of several samples reads the
        prompt. Return False if no request has read more of it."""
        slot, lengths, prompts = state.cache_slot, self._cache.lengths, self._cache.prompts
        most = min(prompts[slot], len(state.token_ids) - 1)
        for other in self._slots.values():
            known = min(lengths[other.cache_slot], most)
            # Rotary factors may depend on the length of the prompt.
            same = prompts[other.cache_slot] == prompts[slot] and other.token_ids[:known] == state.token_ids[:known]
            if same and known > lengths[slot] + MAX_SHARED_PASS:
                state.cache_slot = self._cache.fork(other.cache_slot)
                self._cache.truncate(state.cache_slot, known)
                self._cache.release(slot)
                return True
        return False

    def level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        states = [self._slots[growth.ask.slot] for growth in growths]
        lengths = [len(state.token_ids) for state in states]
        rows = pack_level(growths, [state.cache_slot for state in states], lengths, self._model.device)
        logits = self._model.forward(rows, self._cache, Want()).logits
        return [line[: len(growth.chosen)] for line, growth in zip(logits, growths, strict=True)]

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """Cut or pad the logits to the target's vocabulary."""
        if self._subset is None:
            logits = pad(logits, (0, self._vocab - logits.shape[-1]), value=-math.inf)
        return growth.ask.rank(logits, paths, count, self._subset)
