"""N-gram lookup: draft the tokens that followed the previous occurrence of the text's last few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget, Tap, Verdict

_ID_BITS = 32
"""Token ids are below 2**31, so id + 1 is a digit from 1 to 2**32 - 1."""
_MIN_DRAFT = 3
"""Minimum number of tokens to draft for a match. A pass of four rows costs as much as a pass of two rows."""
_MIN_INDEXED = 1 << 15
"""Number of latest tokens that are always indexed. At most twice this number is indexed, which bounds the memory (about
0.4 kB per token)."""


class NGram(Drafter):
    """Looks up the last n tokens of the text, and drafts a chain of the tokens that followed them earlier.

    The longest match with `min_n` <= n <= `max_n` is used. This is prompt lookup (Saxena 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding) with three differences. If there are several matches, the
    most *recent* is used. An index keeps the cost per token at O(max_n), independent of the length of the text. And the
    draft length depends on the match, because long matches are right more often: a match of n tokens drafts 2n tokens,
    but at least three, and a match of `max_n` tokens uses the whole budget. If a continuation reaches the end of the
    text, it repeats itself, so repetitive text fills the budget.

    Args:
        max_n: Maximum n, at most 64.
        min_n: Minimum n, at least 1.

    Raises:
        InvalidOption: If the two numbers do not satisfy 1 <= min_n <= max_n <= 64.
    """

    free = True
    draft = DraftBudget.chain(15)

    def __init__(self, max_n: int = 5, min_n: int = 1) -> None:
        if not 1 <= min_n <= max_n <= 64:
            raise InvalidOption(
                f"min_n and max_n must satisfy 1 <= min_n <= max_n <= 64, got {min_n} and {max_n}",
                "Change them, or omit them to use 1 and 5",
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
    """Return the tokens to draft after the text and the drafted tokens `path`.

    If `ask.sure` is above 0, only matches of `max_n` tokens are good enough.
    """
    index.catch_up()
    n, start = index.lookup(path)
    count = min(ask.budget.nodes, ask.budget.depth) - len(path)
    if n < index.max_n:
        count = 0 if ask.sure else min(count, max(_MIN_DRAFT, 2 * n))
    if n == 0 or count <= 0:
        return []
    tokens = index.text[start : start + count]
    while len(tokens) < count:
        tokens += tokens
    return tokens[:count]


@dataclass(slots=True)
class _Index:
    """Index of the n-grams of a text.

    It contains only n-grams that end before the text's last token, so the n-gram at the end never finds itself.

    Attributes:
        text: The text.
        min_n: Minimum n.
        max_n: Maximum n.
        follows: Key of an n-gram -> index of the token after its latest occurrence.
        older: The same for earlier tokens. After every `_MIN_INDEXED` tokens, `follows` becomes `older`, and a new
            `follows` begins.
        done: Number of tokens that have been indexed.
    """

    text: list[int]
    min_n: int
    max_n: int
    follows: dict[int, int] = field(default_factory=dict)
    older: dict[int, int] = field(default_factory=dict)
    done: int = 0

    def catch_up(self) -> None:
        """Index the tokens that were added since the previous call. This takes O(max_n) time per token."""
        for end in range(self.done + 1, len(self.text)):
            for key in self._keys(self.text, end):
                self.follows[key] = end
            if not end % _MIN_INDEXED:
                self.follows, self.older = {}, self.follows
        self.done = max(self.done, len(self.text) - 1)

    def lookup(self, path: Sequence[int] = ()) -> tuple[int, int]:
        """Find the longest earlier occurrence of the last tokens of the text followed by `path`.

        Returns:
            The length of the match, and the index of the token after it, or (0, 0) if there is no match.
        """
        best = (0, 0)
        end = [*self.text[-self.max_n :], *path]
        for n, key in enumerate(self._keys(end, len(end)), self.min_n):
            start = self.follows.get(key) or self.older.get(key)
            if start is None:
                # Longer n-grams contain this one, so they do not occur either.
                break
            best = (n, start)
        return best

    def _keys(self, text: Sequence[int], end: int) -> Iterator[int]:
        """Yield the keys of the n-grams that end before index `end`, shortest first.

        A key is a number in base 2**32 without a digit 0, so different n-grams have different keys.
        """
        key = 0
        for n in range(1, min(self.max_n, end) + 1):
            key = key << _ID_BITS | text[end - n] + 1
            if n >= self.min_n:
                yield key
