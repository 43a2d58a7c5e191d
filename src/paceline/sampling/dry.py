"""DRY ("don't repeat yourself"): a penalty on tokens that would extend a repetition. It grows with the repetition's
length.

If a token followed an earlier copy of the text's last n tokens, `multiplier * base ** (n - allowed_length)` is
subtracted from its logit. Sequence breakers end a repetition, so that the layout of a list or a dialogue may recur.
Source: text-generation-webui, pull request 5677; llama.cpp has the same defaults and breakers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.prefix_states import PrefixStates
from paceline.sampling.sampler import Prefix

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

Counts = npt.NDArray[np.int32]
Tails = Sequence[tuple[int, ...]]

_MAX_TAIL = 20
"""Maximum number of tokens in a breaker after the first one, as in llama.cpp."""
_FLOAT32_LOG = 88.7228391
"""Logarithm of the largest float32."""
_MAX_PENALTY = 1e30
"""Maximum penalty. A logit minus this number is finite in float32, even after it is divided by the lowest
temperature."""


class Breakers:
    """The sequence breakers of DRY, as token sequences."""

    def __init__(self, tails: Callable[[int], Tails] = lambda token: ()) -> None:
        """Set the breakers.

        Args:
            tails: Maps the first token of a breaker to the token sequences that complete it. An empty sequence means
                that the token is a whole breaker.
        """
        self._tails = tails

    def is_breaker(self, token: int) -> bool:
        """Return True if this token is a whole breaker."""
        return () in self._tails(token)

    def find_last(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Find the last breaker.

        Returns:
            The index of its first token, and the index after its last token. None if there is no breaker.
        """
        for at in reversed(range(len(tokens))):
            if tails := self._tails(tokens[at]):
                following = tuple(tokens[at + 1 : at + 1 + _MAX_TAIL])
                if fitting := [len(tail) for tail in tails if following[: len(tail)] == tail]:
                    return at, at + 1 + max(fitting)
        return None

    @staticmethod
    def of(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
        """Convert texts to token sequences. This includes tokens that begin before a text or extend beyond it."""
        return Breakers(_BreakerTokens(texts, tokenizer).tails)


class _BreakerTokens:
    """Finds, for each token, the texts that may begin in it. A token is examined only when it is needed, because
    vocabularies are large."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._bytes, self._spell = tokenizer.token_bytes, tokenizer.spell
        self._texts = {text: text.encode() for text in texts}
        self._special = {tokenizer.token_id(text) for text in texts}
        self._rests: dict[bytes, list[tuple[str, str]]] = {}
        """Bytes at the beginning of a text -> the texts that begin with them, and the rest of each text."""
        for text in self._texts:
            for size in range(1, len(text)):
                self._rests.setdefault(text[:size].encode(), []).append((text, text[size:]))
        self._longest = max(map(len, self._rests), default=0)
        self._known: dict[int, Tails] = {}
        self._spelled: dict[str, tuple[int, ...]] = {}

    def tails(self, token: int) -> Tails:
        """See `Breakers`."""
        if token not in self._known:
            self._known[token] = tuple(self._find(token))
        return self._known[token]

    def _find(self, token: int) -> set[tuple[int, ...]]:
        spelling = self._bytes.get(token, b"")
        whole = {text for text, own in self._texts.items() if own in spelling}
        found: set[tuple[int, ...]] = {()} if whole or token in self._special else set()
        for size in range(1, min(len(spelling), self._longest) + 1):
            for text, rest in self._rests.get(spelling[-size:], ()):
                if text not in whole:
                    found.add(self._tail(rest))
        return found

    def _tail(self, text: str) -> tuple[int, ...]:
        if text not in self._spelled:
            self._spelled[text] = tuple(self._spell(text)[:_MAX_TAIL])
        return self._spelled[text]


class _PenalizedText:
    """The committed tokens, followed by room for a drafted path."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens, self.committed = np.array(tokens, np.int32), len(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._write(tokens)
        self.committed += len(tokens)

    def with_path(self, size: int, path: Sequence[int]) -> Counts:
        """Return the first `size` tokens of the text, followed by a drafted path. The next call may overwrite the
        result."""
        self._write(path)
        return self._tokens[:size]

    def _write(self, tokens: Sequence[int]) -> None:
        end = self.committed + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(end, np.int32)])
        self._tokens[self.committed : end] = tokens


@dataclass(frozen=True, slots=True)
class _Repetitions:
    """The repetitions at the end of a text. Their size depends on how often the last token occurs, not on the length of
    the text.

    Attributes:
        size: Number of tokens of the text.
        path: Drafted tokens at the end of the text.
        places: Indices of earlier occurrences of the last token, in ascending order, [n].
        common: For each of these occurrences, the length of the longest sequence that ends there and also ends the
            text, [n].
        breaker: The index of the last breaker's first token, and the index after the breaker. None if there is none.
    """

    size: int
    path: tuple[int, ...]
    places: Counts
    common: Counts
    breaker: tuple[int, int] | None

    @staticmethod
    def of(tokens: Sequence[int], breakers: Breakers) -> _Repetitions:
        """Find the repetitions of a text in linear time, with the Z algorithm on the reversed text."""
        ids, found = [*reversed(tokens)], [0] * len(tokens)
        left = right = 0
        for i in range(1, len(ids)):
            size = min(right - i, found[i - left]) if i < right else 0
            while i + size < len(ids) and ids[size] == ids[i + size]:
                size += 1
            found[i] = size
            if i + size > right:
                left, right = i, i + size
        common = np.array(found[:0:-1], np.int32)
        at = np.flatnonzero(common).astype(np.int32)
        return _Repetitions(len(tokens), (), at, common[at], breakers.find_last(tokens))

    def after_token(self, token: int, text: _PenalizedText, breakers: Breakers) -> _Repetitions:
        """Return the repetitions after appending a token."""
        size, path = self.size + 1, (*self.path, token) if self.size >= text.committed else ()
        tokens = text.with_path(size, path)
        at = np.flatnonzero(tokens[:-1] == token).astype(np.int32)
        common = np.ones(len(at), np.int32)
        # Add the lengths of the repetitions that the token extends. The left side selects them by their new indices,
        # the right side by their old indices.
        longer = (at > 0) & (tokens[at - 1] == tokens[size - 2])
        common[longer] += self.common[tokens[self.places + 1] == token]
        # If a breaker begins earlier than this, it was completed by an earlier token, if at all.
        start = max(size - _MAX_TAIL - 1, 0)
        found = breakers.find_last(tokens[start:].tolist())
        breaker = (start + found[0], start + found[1]) if found else self.breaker
        return _Repetitions(size, path, at, common, breaker)


class Dry:
    """A processor that subtracts DRY's penalty. The penalty depends only on the tokens before a row.

    The committed text is read once, and then extended token by token. Drafted paths are appended to it temporarily.
    """

    def __init__(
        self,
        multiplier: float,
        base: float = 1.75,
        allowed_length: int = 2,
        last_n: int = -1,
        breakers: Breakers | None = None,
    ) -> None:
        """Set the parameters.

        Args:
            multiplier: See the module's docstring.
            base: See the module's docstring.
            allowed_length: See the module's docstring.
            last_n: Number of tokens, at the end of the text, in which to look for repetitions. -1 means all tokens.
            breakers: Sequence breakers.
        """
        self._multiplier, self._base, self._allowed, self._last = multiplier, base, allowed_length, last_n
        self._breakers = breakers or Breakers()
        self._most_exponent = int(_FLOAT32_LOG / math.log(base)) if base > 1.000001 else 2**31 - 1
        self._text = _PenalizedText()
        self._states = PrefixStates(
            self._begin, lambda state, token: state.after_token(token, self._text, self._breakers)
        )

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        self._text.commit(prefix.token_ids[self._text.committed :])
        sizes = self._repeated_tokens(self._states.at(prefix), len(logits))
        repeating = {token: size for token, size in sizes.items() if not self._breakers.is_breaker(token)}
        if not repeating:
            return logits
        ids = torch.tensor([*repeating], dtype=torch.long, device=logits.device)
        penalties = torch.tensor([*map(self._penalty, repeating.values())], dtype=logits.dtype)
        return logits.index_add_(0, ids, penalties.to(logits.device), alpha=-1)

    def _penalty(self, size: int) -> float:
        exponent = min(size - self._allowed, self._most_exponent)
        return min(self._multiplier * self._base**exponent, _MAX_PENALTY)

    def _begin(self, prefix: Prefix) -> tuple[_Repetitions, int]:
        if self._text.committed != len(prefix.token_ids):
            self._text = _PenalizedText(prefix.token_ids)
        return _Repetitions.of(prefix.token_ids, self._breakers), len(prefix.token_ids)

    def _repeated_tokens(self, state: _Repetitions, width: int) -> dict[int, int]:
        """Return the tokens below `width` that would extend a repetition, and for each token the length of the longest
        such repetition."""
        size = state.size if self._last < 0 else min(self._last, state.size)
        if size <= self._allowed:
            return {}
        first, (places, common) = state.size - size, self._places(state)
        at = places[np.searchsorted(places, first) :]
        common = np.minimum(common[len(places) - len(at) :], at - (first - 1))
        longest = min(int(common.max(initial=0)), self._allowed + self._most_exponent)
        limit = longest
        if state.breaker and state.breaker[0] >= first:
            limit = min(limit, state.size - state.breaker[1])
        if limit < self._allowed:
            return {}
        followers = self._text.with_path(state.size, state.path)[at + 1]
        kept = np.flatnonzero((common >= self._allowed) & (followers < width))
        tokens, place = np.unique(followers[kept], return_inverse=True)
        sizes = np.zeros(len(tokens), np.int32)
        np.maximum.at(sizes, place, np.minimum(common[kept], limit))
        return dict(zip(tokens.tolist(), sizes.tolist(), strict=True))

    def _places(self, state: _Repetitions) -> tuple[Counts, Counts]:
        """Return the indices at which repetitions end, and the lengths of the repetitions. If repetitions of length 0
        are penalised, every index is included."""
        if self._allowed:
            return state.places, state.common
        common = np.zeros(max(0, state.size - 1), np.int32)
        common[state.places] = state.common
        return np.arange(len(common), dtype=np.int32), common
