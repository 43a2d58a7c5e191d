"""A text that the reply is expected to be (OpenAI's predicted outputs): a draft that needs no drafter."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

from paceline.types import Draft

_FIRST, _MOST = 4, 32
"""Tokens drafted where the reply has just met the prediction, and at most: doubled by every draft that is kept."""
_PAIR, _LONGEST = 2, 4
"""Tokens that must agree for the reply to have met the prediction again: one more after every draft that failed."""
_CANDIDATES = 32
"""Places compared for one such meeting, so that a prediction of one repeated token costs no more."""


_CHARACTERS = 64
"""Most characters of common tokens: of a longer text only as many are encoded as a reply may have tokens."""


def predicted_ids(
    prediction: str | Sequence[int], encode: Callable[..., list[int]], most: int, vocab_size: int
) -> tuple[int, ...]:
    """Return the first `most` token ids of a prediction, since a reply has no room for more, up to one that the model
    does not have (a tokenizer may know more)."""
    if isinstance(prediction, str):
        prediction = encode(prediction[: most * _CHARACTERS], special=False)
    return tuple(takewhile(lambda token: token < vocab_size, prediction[:most]))


class PredictedReply:
    """Drafts the prediction's next tokens while the reply follows it, and finds it again after a difference.

    What is drafted depends on the text alone, so that a reply is the same under every acceptance rule and in every
    batch. `length`: tokens of the prediction. `accepted`: how many of them the reply has, in their order.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._places: dict[tuple[int, int], list[int]] = {}
        """Pair of tokens -> the places after it, ascending."""
        for place, pair in enumerate(pairwise(self._tokens), _PAIR):
            self._places.setdefault(pair, []).append(place)
        self._at, self._left_at = 0, 0
        """Place of the next token, `length` while the reply says something else; place where it last began to."""
        self._count, self._agreeing = _FIRST, _PAIR
        """Tokens of the next draft; tokens that must agree at the next meeting."""
        self._tail: deque[int] = deque(maxlen=_LONGEST)
        self.length, self.accepted = len(self._tokens), 0

    def propose(self, most: int) -> Draft:
        """Return the next tokens, at most `most`; none while the reply says something else."""
        return Draft.chain(self._tokens[self._at : self._at + max(0, min(self._count, most))])

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Follow the tokens of a round, in which `draft` was verified."""
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
        """Return the place after the reply's last tokens, the next one from where it was left; `length` if none."""
        places = self._places.get((self._tail[-2], self._tail[-1]), []) if len(self._tail) >= _PAIR else []
        first = bisect_left(places, self._left_at)
        wanted = (*self._tail,)[-self._agreeing :]
        for place in (*places[first : first + _CANDIDATES], *places[: min(first, _CANDIDATES)]):
            if self._tokens[max(0, place - len(wanted)) : place] == wanted:
                return place
        return self.length
