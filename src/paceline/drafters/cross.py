"""Draft models whose tokenizer differs from the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.growth import TreeGrowth
from paceline.drafters.model import DraftModel, SavedText
from paceline.drafters.retokenizer import Retokenizer, TokenMapper, TokenReader, continuation
from paceline.drafters.vocab_map import VocabMap
from paceline.errors import TokenizerMismatch
from paceline.protocols import KVCache, Target
from paceline.sampling.sampler import Prefix, Ranked, Sampler
from paceline.types import Draft, DraftBudget, Forward, Rows, Tap, Verdict, Want
from paceline.verify.tree import from_paths, paths_of

MIN_SHARED_VOCABULARY = 0.85
"""Minimum share of the target's tokens that the draft model also has, for `SharedTokenDrafter` to be used. Above this
share, its drafts are accepted as often as the drafts of `TextDrafter` in greedy decoding, and more often in sampling
(docs/notes/drafters.md#drafting-across-tokenizers)."""

_GREEDY = Sampler()
R = TypeVar("R", bound=TokenReader)


def cross_vocabulary_drafter(target: Loaded, draft: Loaded, name: str) -> Drafter:
    """Return a drafter for a draft model with another tokenizer, and log its kind.

    It is a `SharedTokenDrafter` if the vocabularies share most tokens of a sample text, and a `TextDrafter` otherwise.

    Args:
        target: The target.
        draft: The draft model.
        name: Name of the drafter for messages.

    Raises:
        TokenizerMismatch: If a vocabulary has no tokens that stand for text.
    """
    vocab_map = VocabMap(target, draft)
    for side, texts in (("The target", vocab_map.target_bytes), (name, vocab_map.draft_bytes)):
        if not texts:
            raise TokenizerMismatch(f"{side} has no token that stands for text", "Use a text model as the draft model")
    share = vocab_map.shared_fraction()
    how = "and only these are drafted" if share >= MIN_SHARED_VOCABULARY else "so the drafted text is tokenized again"
    getLogger(__name__).warning(
        "%s has another tokenizer than the target. They share %.0f %% of the tokens of a sample text, %s",
        name,
        100 * share,
        how,
    )
    return SharedTokenDrafter(vocab_map) if share >= MIN_SHARED_VOCABULARY else TextDrafter(vocab_map)


class _CrossVocabularyDrafter(DraftModel, Generic[R]):
    """A draft model that converts the target's text to its own tokens."""

    def __init__(self, model: Target, vocab_size: int, vocab_map: VocabMap, reader: Callable[[], R]) -> None:
        super().__init__(model, vocab_size)
        self._vocab_map, self._reader = vocab_map, reader
        self._readers: dict[int, R] = {}
        self._unread: dict[int, list[int]] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        reader = self._reader()
        reader.read(self._vocab_map.without_opening(prompt))
        super().admit(slot, reader.ids)
        self._readers[slot], self._unread[slot] = reader, []

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._unread[slot] += verdict.tokens

    def unread(self, slot: int) -> int | None:
        return (super().unread(slot) or 0) + len(self._unread[slot])

    def load(self, slot: int, saved: SavedText, length: int) -> None:
        """Load the longest common prefix of the draft tokens. `length` counts target tokens, so it is not used."""
        super().load(slot, saved, saved.length)

    def release(self, slot: int) -> None:
        self._readers.pop(slot, None)
        self._unread.pop(slot, None)
        super().release(slot)

    def limit(self, ask: Ask) -> DraftBudget:
        # The draft model needs at least one token that it can read.
        return super().limit(ask) if self._slots[ask.slot].token_ids else DraftBudget.chain(0)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        for ask in asks:
            self._read(ask.slot)
        return super().propose(asks)

    def _read(self, slot: int) -> None:
        """Convert the tokens that were committed since the previous call. The cache keeps the draft tokens that are
        still valid."""
        reader, state = self._readers[slot], self._slots[slot]
        valid = reader.read(self._unread[slot])
        self._unread[slot].clear()
        state.token_ids[valid:] = reader.ids[valid:]
        self._cache.truncate(state.cache_slot, min(valid, self._cache.lengths[state.cache_slot]))


class SharedTokenDrafter(_CrossVocabularyDrafter[TokenMapper]):
    """Drafts only tokens that both vocabularies have ("token-level intersection", arXiv 2502.05202).

    Candidates are target tokens. As with any draft model, the sampler ranks or draws them, with their q, for chains and
    trees. Target tokens that the draft model lacks are never drafted. When they occur in the text, the draft model
    reads them spelled in its own tokens.
    """

    def __init__(self, vocab_map: VocabMap) -> None:
        model = _TargetVocabulary(vocab_map)
        super().__init__(model, model.vocab_size, vocab_map, lambda: TokenMapper(vocab_map, model.vocab_size))


class _TargetVocabulary:
    """The draft model as a `Target` with the target's vocabulary.

    Ids below `vocab_size` are target tokens. Draft tokens have their id plus `vocab_size`.
    """

    def __init__(self, vocab_map: VocabMap) -> None:
        self._model = vocab_map.draft.target
        self.vocab_size = vocab_map.target.target.vocab_size
        self.context_length, self.device = self._model.context_length, self._model.device
        target_ids, draft_ids = (
            torch.tensor(list(ids), device=self.device) for ids in (vocab_map.shared, vocab_map.shared.values())
        )
        self._target_ids, self._draft_ids = target_ids.long(), draft_ids.long()
        # A logits processor may force a token that the draft model lacks. The draft model then reads a wrong token,
        # which only lowers acceptance.
        self._to_draft = torch.arange(-self.vocab_size, self._model.vocab_size, device=self.device).clamp(min=0)
        self._to_draft[self._target_ids] = self._draft_ids

    def new_cache(self) -> KVCache:
        return self._model.new_cache()

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        out = self._model.forward(replace(rows, tokens=self._to_draft[rows.tokens]), cache, want)
        logits = out.logits.new_full((*out.logits.shape[:-1], self.vocab_size), -torch.inf)
        logits[..., self._target_ids] = out.logits[..., self._draft_ids]
        return Forward(logits, out.taps)


class TextDrafter(_CrossVocabularyDrafter[Retokenizer]):
    """Drafts text, which is then encoded in target tokens (as in SLEM, arXiv 2502.05202).

    The draft model reads and writes its own tokens. It drafts the likeliest tokens at any temperature. Two vocabularies
    cannot share noise, and independent draws would match the target's draws less often
    (docs/notes/drafters.md#drafting-across-tokenizers).
    """

    # In target tokens, a sibling's path may be longer than the likeliest path, and would then take nodes away from it.
    draft = DraftBudget.chain(8)

    def __init__(self, vocab_map: VocabMap) -> None:
        model = vocab_map.draft.target
        super().__init__(model, model.vocab_size, vocab_map, lambda: Retokenizer(vocab_map))

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        return _GREEDY.rank(Prefix(), logits, paths, count)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._to_target(ask, draft) for ask, draft in zip(asks, super().propose(asks), strict=True)]

    def _to_target(self, ask: Ask, draft: Draft) -> Draft:
        if not draft.tokens:
            return draft
        incomplete = self._readers[ask.slot].incomplete
        leaves = (path for row, path in paths_of(draft).items() if row not in draft.parents)
        paths = [self._target_path(ask, [draft.tokens[row - 1] for row in path], incomplete) for path in leaves]
        return _fit_to_budget(from_paths(path[: ask.budget.depth] for path in paths), ask.budget)

    def _target_path(self, ask: Ask, path: Sequence[int], incomplete: bytes) -> list[int]:
        """Convert a path of draft tokens to target tokens. Stop at an EOS token or at a token without text."""
        text, end = b"", []
        for token in path:
            if token in self._vocab_map.ends or token not in self._vocab_map.draft_bytes:
                end = [self._vocab_map.ends[token]] if token in self._vocab_map.ends else []
                break
            text += self._vocab_map.draft_bytes[token]
        if not text.startswith(incomplete):
            return []
        # The last token may end inside a character. Drop such an incomplete character.
        text = text.decode(errors="ignore").encode()[len(incomplete) :]
        return continuation(self._vocab_map, ask.token_ids, text) + end


def _fit_to_budget(draft: Draft, budget: DraftBudget) -> Draft:
    """Return the first nodes of a tree that fit into the budget. When paths are encoded again, their branches may
    move."""
    rows, children = {0: 0}, Counter[int]()
    kept: list[tuple[int, int]] = []
    for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        if parent in rows and children[parent] < budget.branch and len(kept) < budget.nodes:
            kept.append((token, rows[parent]))
            children[parent] += 1
            rows[row] = len(kept)
    return Draft(tuple(token for token, _ in kept), tuple(parent for _, parent in kept))
