"""Drafting by n-gram lookup: whatever followed the last few tokens when they last occurred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget, Tap, Verdict

_ID_BITS = 32
"""Token ids are below 2**31, so id + 1 is a digit from 1 to 2**32 - 1."""
_FREE = 3
"""A pass of four rows costs what a pass of two does, so three tokens are drafted on any match."""


class NGram(Drafter):
    """Looks up the last n tokens of prompt and output, n from `max_n` down to `min_n`, and drafts what followed.

    Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), with three differences. Of
    several matches the most *recent* counts. An index makes a token cost O(max_n) however long the text is. And a match
    of n tokens earns a draft of 2n (three at least, which cost nothing; the whole budget for n = `max_n`), because long
    matches are right more often. A continuation that runs into the end of the text goes on into itself, so that a
    repeating text fills the budget. Drafts a chain whatever the budget's branch.

    Raises `InvalidOption` unless 1 <= min_n <= max_n <= 64.
    """

    free = True
    draft = DraftBudget.chain(15)

    def __init__(self, max_n: int = 5, min_n: int = 1) -> None:
        if not 1 <= min_n <= max_n <= 64:
            raise InvalidOption(
                f"min_n and max_n must satisfy 1 <= min_n <= max_n <= 64, got {min_n} and {max_n}", "Give other lengths"
            )
        self._min_n, self._max_n = min_n, max_n
        self._slots: dict[int, _Index] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._slots[slot] = _Index(list(prompt), self._min_n, self._max_n)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._slots[slot].text += verdict.tokens

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft.chain(_continuation(ask, self._slots[ask.slot], ())) for ask in asks]

    def extend(self, ask: Ask, draft: Draft) -> Draft:
        more = _continuation(replace(ask, sure=1.0), self._slots[ask.slot], draft.tokens)
        tokens = (*draft.tokens, *more)
        return replace(draft, tokens=tokens, parents=tuple(range(len(tokens))))


def _continuation(ask: Ask, index: _Index, path: Sequence[int]) -> list[int]:
    """Return what follows the text and then `path`; only after the longest match if another drafter stands by."""
    index.catch_up()
    n, start = index.lookup(path)
    count = min(ask.budget.nodes, ask.budget.depth) - len(path)
    if n < index.max_n:
        count = 0 if ask.sure else min(count, max(_FREE, 2 * n))
    if n == 0 or count <= 0:
        return []
    tokens = index.text[start : start + count]
    while len(tokens) < count:
        tokens += tokens
    return tokens[:count]


@dataclass(slots=True)
class _Index:
    """`follows`: where the text went on after the latest occurrence of an n-gram, by its key.

    Holds the n-grams that end before the text's last token (`done` of them per n), so the one that ends the text
    finds an earlier occurrence and never itself.
    """

    text: list[int]
    min_n: int
    max_n: int
    follows: dict[int, int] = field(default_factory=dict)
    done: int = 0

    def catch_up(self) -> None:
        """Index the tokens added since the last call. O(max_n) per token."""
        for end in range(self.done + 1, len(self.text)):
            for key in self._keys(self.text, end):
                self.follows[key] = end
        self.done = max(self.done, len(self.text) - 1)

    def lookup(self, path: Sequence[int] = ()) -> tuple[int, int]:
        """Return the longest n whose last n tokens, of the text and then `path`, occurred before in the text, and the
        index after that occurrence; or (0, 0)."""
        best = (0, 0)
        end = [*self.text[-self.max_n :], *path]
        for n, key in enumerate(self._keys(end, len(end)), self.min_n):
            start = self.follows.get(key)
            if start is None:
                # A longer n-gram holds this one, so it is not known either.
                break
            best = (n, start)
        return best

    def _keys(self, text: Sequence[int], end: int) -> Iterator[int]:
        """Keys of the n-grams before `end`, shortest first. Exact: numbers in base 2**32 without a digit 0."""
        key = 0
        for n in range(1, min(self.max_n, end) + 1):
            key = key << _ID_BITS | text[end - n] + 1
            if n >= self.min_n:
                yield key
