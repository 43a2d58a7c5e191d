"""A draft model with another tokenizer than the target's."""

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
from paceline.drafters.growth import Growth
from paceline.drafters.model import DraftModel, SavedText
from paceline.drafters.transcript import Respelled, TokenReader, Transcript, continuation
from paceline.drafters.vocab_map import VocabMap
from paceline.errors import TokenizerMismatch
from paceline.protocols import KVCache, Target
from paceline.sampling.sampler import Prefix, Ranked, Sampler
from paceline.types import Draft, DraftBudget, Forward, Rows, Tap, Verdict, Want
from paceline.verify.tree import from_paths

SHARED = 0.85
"""From this share of the target's tokens on, drafting the shared ones accepts as much as drafting text when greedy, and
more when not (LOG.md)."""

_LIKELIEST = Sampler()
R = TypeVar("R", bound=TokenReader)


def cross(target: Loaded, draft: Loaded, name: str) -> Drafter:
    """A drafter from a model whose tokenizer is not the target's: `SharedTokens` where the two write most of a text
    with the same tokens, else `Retold`. Says which on the log. Raises `TokenizerMismatch` where one has no words."""
    words = VocabMap(target, draft)
    for side, said in (("The target", words.said), (name, words.drafted)):
        if not said:
            raise TokenizerMismatch(f"{side} has no token that says anything", "Draft with a language model")
    share = words.share()
    how = "of them are drafted" if share >= SHARED else "are too few, and its text is encoded anew"
    getLogger(__name__).warning(
        "%s has another tokenizer than the target: tokens that both have (%.0f %%) %s", name, 100 * share, how
    )
    return SharedTokens(words) if share >= SHARED else Retold(words)


class _Foreign(DraftModel, Generic[R]):
    """A draft model that reads the target's text in tokens of its own."""

    def __init__(self, model: Target, vocab_size: int, words: VocabMap, reader: Callable[[], R]) -> None:
        super().__init__(model, vocab_size)
        self._words, self._reader = words, reader
        self._readers: dict[int, R] = {}
        self._unread: dict[int, list[int]] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        reader = self._reader()
        reader.read(self._words.body(prompt))
        super().admit(slot, reader.ids)
        self._readers[slot], self._unread[slot] = reader, []

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._unread[slot] += verdict.tokens

    def load(self, slot: int, saved: SavedText, length: int) -> None:
        """As many of its own tokens as are the same, however many of the target's those are."""
        super().load(slot, saved, saved.length)

    def release(self, slot: int) -> None:
        self._readers.pop(slot, None)
        self._unread.pop(slot, None)
        super().release(slot)

    def limit(self, ask: Ask) -> DraftBudget:
        # A text of nothing that the draft can read gives it nothing to go on from.
        return super().limit(ask) if self._slots[ask.slot].token_ids else DraftBudget.chain(0)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        for ask in asks:
            self._read(ask.slot)
        return super().propose(asks)

    def _read(self, slot: int) -> None:
        """Take in what was committed; the cache keeps what still stands."""
        reader, state = self._readers[slot], self._slots[slot]
        stand = reader.read(self._unread[slot])
        self._unread[slot].clear()
        state.token_ids[stand:] = reader.ids[stand:]
        self._cache.truncate(state.cache_slot, min(stand, self._cache.lengths[state.cache_slot]))


class SharedTokens(_Foreign[Respelled]):
    """Drafts among the tokens that both vocabularies have ("token-level intersection", arXiv 2502.05202).

    The draft model then speaks the target's language: candidates are target tokens, ranked or drawn with the sampler
    as those of any draft model are, in chains and trees, with their q. Target tokens that it lacks reach it spelled in
    its own; it never drafts them.
    """

    def __init__(self, words: VocabMap) -> None:
        model = _Interpreter(words)
        super().__init__(model, model.vocab_size, words, lambda: Respelled(words, model.vocab_size))


class _Interpreter:
    """The draft model as a `Target` with the target's vocabulary: token ids below `vocab_size` are the target's, the
    draft's own follow."""

    def __init__(self, words: VocabMap) -> None:
        self._model = words.draft.target
        self.vocab_size = words.target.target.vocab_size
        self.context_length, self.device = self._model.context_length, self._model.device
        ours, theirs = (torch.tensor(list(ids), device=self.device) for ids in (words.shared, words.shared.values()))
        self._ours, self._theirs = ours.long(), theirs.long()
        # A processor of the user's may force a token that the draft lacks: it reads something, and errs.
        self._own = torch.arange(-self.vocab_size, self._model.vocab_size, device=self.device).clamp(min=0)
        self._own[self._ours] = self._theirs

    def new_cache(self) -> KVCache:
        return self._model.new_cache()

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        out = self._model.forward(replace(rows, tokens=self._own[rows.tokens]), cache, want)
        logits = out.logits.new_full((*out.logits.shape[:-1], self.vocab_size), -torch.inf)
        logits[..., self._ours] = out.logits[..., self._theirs]
        return Forward(logits, out.taps)


class Retold(_Foreign[Transcript]):
    """Drafts text, which is then cut into target tokens (as SLEM does, arXiv 2502.05202).

    The draft model reads and writes tokens of its own. What it writes are its likeliest, at any temperature: its tokens
    are not the target's, so no noise can be shared, and a draw of its own would meet the target's less often (LOG.md).
    """

    def __init__(self, words: VocabMap) -> None:
        model = words.draft.target
        super().__init__(model, model.vocab_size, words, lambda: Transcript(words))

    def rank(self, growth: Growth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        return _LIKELIEST.rank(Prefix(), logits, paths, count)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._answer(ask, draft) for ask, draft in zip(asks, super().propose(asks), strict=True)]

    def _answer(self, ask: Ask, draft: Draft) -> Draft:
        incomplete = self._readers[ask.slot].incomplete
        paths = [self._retold(ask, path, incomplete) for path in _branches(draft)]
        return _within(from_paths(path[: ask.budget.depth] for path in paths), ask.budget)

    def _retold(self, ask: Ask, path: Sequence[int], incomplete: bytes) -> list[int]:
        """A path of draft tokens in target tokens, up to an end or to what cannot be said."""
        said, end = b"", []
        for token in path:
            if token in self._words.ends or token not in self._words.drafted:
                end = [self._words.ends[token]] if token in self._words.ends else []
                break
            said += self._words.drafted[token]
        if not said.startswith(incomplete):
            return []
        # Tokens may begin a character that they do not end.
        said = said.decode(errors="ignore").encode()[len(incomplete) :]
        return continuation(self._words, ask.token_ids, said) + end


def _branches(draft: Draft) -> list[list[int]]:
    """The tokens on the way to every leaf."""
    ways: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        ways.append([*ways[parent], token])
    return [way for row, way in enumerate(ways) if row not in draft.parents]


def _within(draft: Draft, budget: DraftBudget) -> Draft:
    """The first nodes of a tree, as many as the budget has; texts that part early may meet in few tokens."""
    rows, children = {0: 0}, Counter[int]()
    kept: list[tuple[int, int]] = []
    for row, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        if parent in rows and children[parent] < budget.branch and len(kept) < budget.nodes:
            kept.append((token, rows[parent]))
            children[parent] += 1
            rows[row] = len(kept)
    return Draft(tuple(token for token, _ in kept), tuple(parent for _, parent in kept))
