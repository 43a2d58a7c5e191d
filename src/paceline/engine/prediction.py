"""Predicted outputs, as in OpenAI's API: the expected text of a reply is used as a draft, without a drafter."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

from paceline.types import Draft

_MIN_LENGTH, _MAX_LENGTH = 4, 32
"""Draft length when the reply has just begun to follow the prediction, and maximum draft length. Each fully accepted
draft doubles the length."""
_MIN_MATCH, _MAX_MATCH = 2, 4
"""Number of tokens that must match before drafting resumes after a difference, and maximum of this number. Each draft
whose first token is rejected increments it."""
_MAX_CANDIDATES = 32
"""Maximum number of places to compare. It keeps predictions that repeat one token from being slow."""


_MAX_TOKEN_CHARACTERS = 64
"""Assumed maximum length of a token, in characters. It limits how much text of a long prediction is encoded."""


def predicted_ids(
    prediction: str | Sequence[int], encode: Callable[..., list[int]], most: int, vocab_size: int
) -> tuple[int, ...]:
    """Return the token ids of a prediction.

    Args:
        prediction: Text or token ids.
        encode: The tokenizer's function to encode text.
        most: Maximum number of ids to return: the tokens for which the reply has room.
        vocab_size: Size of the model's vocabulary. A tokenizer may have more tokens than its model, so the ids stop
            before the first one that the model lacks.
    """
    if isinstance(prediction, str):
        prediction = encode(prediction[: most * _MAX_TOKEN_CHARACTERS], special=False)
    return tuple(takewhile(lambda token: token < vocab_size, prediction[:most]))


class PredictedReply:
    """Drafts the next tokens of a prediction while the reply follows it. After a difference, it looks for the place in
    the prediction where the reply continues.

    Drafts depend only on the text, so the reply is the same in any batch, whichever acceptance rule is used.

    Attributes:
        length: Number of tokens of the prediction.
        accepted: Number of predicted tokens that the reply contains, in order.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._places: dict[tuple[int, int], list[int]] = {}
        """Pair of adjacent tokens -> the places after its occurrences in the prediction, in ascending order."""
        for place, pair in enumerate(pairwise(self._tokens), _MIN_MATCH):
            self._places.setdefault(pair, []).append(place)
        self._at, self._left_at = 0, 0
        """Place of the next token in the prediction (`length` while the reply differs), and the place where the reply
        most recently began to differ."""
        self._count, self._agreeing = _MIN_LENGTH, _MIN_MATCH
        """Length of the next draft, and the number of tokens that must match before the prediction is taken up
        again."""
        self._tail: deque[int] = deque(maxlen=_MAX_MATCH)
        self.length, self.accepted = len(self._tokens), 0

    def propose(self, most: int) -> Draft:
        """Return a chain of up to `most` predicted tokens. It is empty while the reply differs from the prediction."""
        return Draft.chain(self._tokens[self._at : self._at + max(0, min(self._count, most))])

    def observe(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Follow the prediction along the tokens of a committed round. `draft`: The draft that the round verified."""
        own = bool(draft.tokens) and draft.tokens == self._tokens[self._at : self._at + len(draft.tokens)]
        kept = own and tokens[: len(draft.tokens)] == draft.tokens
        if own:
            self._count = min(2 * self._count, _MAX_LENGTH) if kept else _MIN_LENGTH
            self._agreeing = _MIN_MATCH if kept else min(self._agreeing + (tokens[:1] != draft.tokens[:1]), _MAX_MATCH)
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        self._tail.append(token)
        if self._at < self.length and self._tokens[self._at] == token:
            self._at += 1
            self.accepted = min(self.accepted + 1, self.length)
            return
        if self._at < self.length:
            self._left_at, self._count = self._at, _MIN_LENGTH
        self._at = self._meeting()

    def _meeting(self) -> int:
        """Return the place after an occurrence of the reply's last tokens, or `length` if there is none.

        The search begins where the reply most recently began to differ.
        """
        places = self._places.get((self._tail[-2], self._tail[-1]), []) if len(self._tail) >= _MIN_MATCH else []
        first = bisect_left(places, self._left_at)
        wanted = (*self._tail,)[-self._agreeing :]
        for place in (*places[first : first + _MAX_CANDIDATES], *places[: min(first, _MAX_CANDIDATES)]):
            if self._tokens[max(0, place - len(wanted)) : place] == wanted:
                return place
        return self.length
