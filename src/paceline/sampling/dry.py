"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition that a token would extend.

If a token followed an earlier copy of the text's last n tokens, `multiplier * base ** (n - allowed_length)` is
subtracted from its logit. Sequence breakers end a repetition, so that the form of a list or a dialogue may recur.
Source: text-generation-webui, pull request 5677; llama.cpp has the same defaults and breakers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.sampling.sampler import Prefix

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

Counts = npt.NDArray[np.int32]

_MOST_TAIL = 20
"""Maximum number of tokens of a breaker after its first token, as in llama.cpp."""
_MOST_KNOWN = 16
"""Number of sets of breakers to cache for each tokenizer."""
_FLOAT32_LOG = 88.7228391
"""Logarithm of the largest float32."""


@dataclass(frozen=True, slots=True)
class Breakers:
    """Sequence breakers as tokens.

    Attributes:
        tails: First token of a breaker -> token sequences that complete it. () means that the token is a whole breaker.
    """

    tails: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def alone(self, token: int) -> bool:
        """Return True if the token is a whole breaker."""
        return () in self.tails.get(token, ())

    def since(self, tokens: Sequence[int] | Counts, most: int) -> int:
        """Return the number of tokens since the last breaker, but at most `most`."""
        for i in range(min(len(tokens), most + _MOST_TAIL) if self.tails else 0):
            at = len(tokens) - 1 - i
            tails = self.tails.get(int(tokens[at]), ())
            fitting = [len(t) for t in tails if len(t) <= i and tuple(tokens[at + 1 : at + 1 + len(t)]) == t]
            if fitting:
                return min(i - max(fitting), most)
        return most

    @staticmethod
    def of(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
        """Convert texts to tokens, including all ways in which a model may write them. Results are cached."""
        known = _known.setdefault(tokenizer, {})
        if (key := tuple(texts)) not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = Breakers(_tails(key, tokenizer))
        return known[key]


_known: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()


def _tails(texts: Sequence[str], tokenizer: Tokenizer) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    vocabulary = _Spellings(tokenizer.token_bytes)
    for text in texts:
        special = tokenizer.token_id(text)
        whole = {*vocabulary.holding(text.encode()), *(() if special is None else (special,))}
        begun: list[tuple[int, tuple[int, ...]]] = [(token, ()) for token in whole]
        for size in range(1, len(text)):
            heads = vocabulary.holding(text[:size].encode(), at_end=True)
            tail = tuple(tokenizer.spell(text[size:])[:_MOST_TAIL])
            begun += [(token, tail) for token in heads if token not in whole]
        for token, tail in begun:
            if tail not in (tails := found.setdefault(token, [])):
                tails.append(tail)
    return found


class _Spellings:
    """The bytes of all tokens in one text. Searching it is many times faster than searching each token."""

    _BETWEEN = b"\xff"  # never occurs in UTF-8

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._ids = [*token_bytes]
        self._text = b"".join(spelling + self._BETWEEN for spelling in token_bytes.values())
        self._starts = [0, *accumulate(len(spelling) + 1 for spelling in token_bytes.values())]

    def holding(self, part: bytes, at_end: bool = False) -> set[int]:
        """Return the tokens that contain `part` or, if `at_end`, end with it."""
        wanted = part + self._BETWEEN if at_end else part
        return {self._ids[bisect_right(self._starts, at) - 1] for at in self._places(wanted)}

    def _places(self, part: bytes) -> Iterator[int]:
        at = self._text.find(part)
        while at >= 0:
            yield at
            at = self._text.find(part, at + 1)


@dataclass(frozen=True, slots=True)
class _Repetitions:
    """The repetitions in a text of n tokens.

    Attributes:
        tokens: The text, [n].
        common: For each place except the last, how many tokens before and at it equal the last tokens of the text,
            [n - 1].
    """

    tokens: Counts
    common: Counts

    @staticmethod
    def of(tokens: Sequence[int]) -> _Repetitions:
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
        return _Repetitions(np.array(tokens, np.int32), np.array(found[:0:-1], np.int32))

    def then(self, token: int) -> _Repetitions:
        """Return the repetitions after appending a token."""
        common = np.ones(len(self.tokens), np.int32)
        common[1:] += self.common
        common *= self.tokens == token
        return _Repetitions(np.append(self.tokens, np.int32(token)), common)


class Dry:
    """Subtracts DRY's penalty, which depends only on the tokens before a row.

    The committed text is read once and then grows token by token. Drafted paths are appended to it temporarily.
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
            last_n: Number of last tokens of prompt and reply to look at. -1 means all.
            breakers: Sequence breakers.
        """
        self._multiplier, self._base, self._allowed, self._last = multiplier, base, allowed_length, last_n
        self._breakers = breakers or Breakers()
        self._most_exponent = int(_FLOAT32_LOG / math.log(base)) if base > 1.000001 else 2**31 - 1
        self._texts: dict[tuple[int, ...], _Repetitions] = {}
        """Drafted tokens -> repetitions of the committed text followed by these tokens."""
        self._size = -1

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        sizes = self._repeated(self._at(prefix), len(logits))
        repeating = [token for token in np.flatnonzero(sizes >= 0).tolist() if not self._breakers.alone(token)]
        if not repeating:
            return logits
        ids = torch.tensor(repeating, dtype=torch.long, device=logits.device)
        penalties = torch.tensor([*map(self._penalty, sizes[repeating].tolist())], dtype=logits.dtype)
        return logits.index_add_(0, ids, penalties.to(logits.device), alpha=-1)

    def _penalty(self, size: int) -> float:
        return min(self._multiplier * self._base ** min(size - self._allowed, self._most_exponent), 1e38)

    def _at(self, prefix: Prefix) -> _Repetitions:
        if self._size != len(prefix.token_ids):
            text = self._texts.get(())
            if text is None or self._size > len(prefix.token_ids):
                text = _Repetitions.of(prefix.token_ids)
            for token in prefix.token_ids[len(text.tokens) :]:
                text = text.then(token)
            self._texts, self._size = {(): text}, len(prefix.token_ids)
        path = tuple(prefix.path)
        for size in range(1, len(path) + 1):
            if path[:size] not in self._texts:
                self._texts[path[:size]] = self._texts[path[: size - 1]].then(path[size - 1])
        return self._texts[path]

    def _repeated(self, text: _Repetitions, width: int) -> Counts:
        """Return for each token [width] the length of the longest repetition that it would extend, or -1."""
        found = np.full(width, -1, np.int32)
        size = len(text.tokens) if self._last < 0 else min(self._last, len(text.tokens))
        if size <= self._allowed:
            return found
        tokens = text.tokens[len(text.tokens) - size :]
        common = np.minimum(text.common[len(text.common) - size + 1 :], np.arange(1, size, dtype=np.int32))
        longest = min(int(common.max(initial=0)), self._allowed + self._most_exponent)
        limit = self._breakers.since(tokens, longest)
        if limit >= self._allowed:
            at = np.flatnonzero((common >= self._allowed) & (tokens[1:] < width))
            np.maximum.at(found, tokens[at + 1], np.minimum(common[at], limit))
        return found
