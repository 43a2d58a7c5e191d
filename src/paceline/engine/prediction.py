"""Predicted outputs, as in OpenAI's API: the expected text of a reply is used as a draft, without a drafter."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

from paceline.types import Draft

_FIRST, _MOST = 4, 32
"""Draft length when the reply has just met the prediction, and its maximum. Every accepted draft doubles it."""
_PAIR, _LONGEST = 2, 4
"""Number of tokens that must match to find the prediction again, and its maximum. Every failed draft increments it."""
_CANDIDATES = 32
"""Maximum number of places to compare, so that a prediction that repeats one token is not slow."""


_CHARACTERS = 64
"""Assumed maximum length of a token, in characters. It limits how much of a long prediction is encoded."""


def predicted_ids(
    prediction: str | Sequence[int], encode: Callable[..., list[int]], most: int, vocab_size: int
) -> tuple[int, ...]:
    """Return the token ids of a prediction.

    Args:
        prediction: Text or token ids.
        encode: The tokenizer's function to encode text.
        most: Maximum number of tokens, since the reply has no room for more.
        vocab_size: Size of the model's vocabulary. The ids end before the first one that the model does not have, since
            a tokenizer may have more tokens than its model.
    """
    if isinstance(prediction, str):
        prediction = encode(prediction[: most * _CHARACTERS], special=False)
    return tuple(takewhile(lambda token: token < vocab_size, prediction[:most]))


class PredictedReply:
    """Drafts the next tokens of a prediction while the reply follows it, and finds it again after a difference.

    Drafts depend only on the text, so a reply is the same in every batch, under every acceptance rule.

    Attributes:
        length: Number of tokens of the prediction.
        accepted: Number of these tokens that the reply contains, in order.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._places: dict[tuple[int, int], list[int]] = {}
        """Pair of tokens -> places after its occurrences in the prediction, ascending."""
        for place, pair in enumerate(pairwise(self._tokens), _PAIR):
            self._places.setdefault(pair, []).append(place)
        self._at, self._left_at = 0, 0
        """Place of the next token, or `length` while the reply differs; place where the reply last began to differ."""
        self._count, self._agreeing = _FIRST, _PAIR
        """Length of the next draft; number of tokens that must match to find the prediction again."""
        self._tail: deque[int] = deque(maxlen=_LONGEST)
        self.length, self.accepted = len(self._tokens), 0

    def propose(self, most: int) -> Draft:
        """Return up to `most` next tokens, or none while the reply differs from the prediction."""
        return Draft.chain(self._tokens[self._at : self._at + max(0, min(self._count, most))])

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Follow the tokens of a round. `draft`: The draft that the round verified."""
        own = bool(draft.tokens) and draft.tokens == self._tokens[self._at : self._at + len(draft.tokens)]
        kept = own and tokens[: len(draft.tokens)] == draft.tokens
        if own:
            self._count = min(2 * self._count, _MOST) if kept else _FIRST
            self._agreeing = _PAIR if kept else min(self._agreeing + (tokens[:1] != draft.tokens[:1]), _LONGEST)
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        self._tail.append(token)
        if self._at < self.length and self._tokens[self._at] == token:
            self._at += 1
            self.accepted = min(self.accepted + 1, self.length)
            return
        if self._at < self.length:
            self._left_at, self._count = self._at, _FIRST
        self._at = self._meeting()

    def _meeting(self) -> int:
        """Return the place after an occurrence of the reply's last tokens, or `length` if there is none.

        The search begins where the reply last began to differ.
        """
        places = self._places.get((self._tail[-2], self._tail[-1]), []) if len(self._tail) >= _PAIR else []
        first = bisect_left(places, self._left_at)
        wanted = (*self._tail,)[-self._agreeing :]
        for place in (*places[first : first + _CANDIDATES], *places[: min(first, _CANDIDATES)]):
            if self._tokens[max(0, place - len(wanted)) : place] == wanted:
                return place
        return self.length
