"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition that a token would continue.

A token that followed an earlier copy of the text's last n tokens loses `multiplier * base ** (n - allowed_length)` from
its logit. Sequence breakers end a repetition, so that the form of a list or of a dialogue may recur. Source:
text-generation-webui, pull request 5677; llama.cpp has the same defaults and the same breakers.
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
"""Tokens of a breaker after its first one, as in llama.cpp."""
_MOST_KNOWN = 16
"""Sets of breakers that are kept for one tokenizer."""
_FLOAT32_LOG = 88.7228391
"""The logarithm of the highest float32."""


@dataclass(frozen=True, slots=True)
class Breakers:
    """Sequence breakers as tokens: the first token -> what may follow it, () if the token is a breaker by itself."""

    tails: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    def alone(self, token: int) -> bool:
        """Return True if the token is a breaker by itself."""
        return () in self.tails.get(token, ())

    def since(self, tokens: Sequence[int] | Counts, most: int) -> int:
        """Return the number of tokens since the last breaker; `most` if there are at least as many."""
        for i in range(min(len(tokens), most + _MOST_TAIL) if self.tails else 0):
            at = len(tokens) - 1 - i
            tails = self.tails.get(int(tokens[at]), ())
            fitting = [len(t) for t in tails if len(t) <= i and tuple(tokens[at + 1 : at + 1 + len(t)]) == t]
            if fitting:
                return min(i - max(fitting), most)
        return most

    @staticmethod
    def of(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
        """Return texts as tokens of a tokenizer: whatever tokens a model writes them with. Results are kept."""
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
    """The bytes of all tokens in one text, which is searched many times as fast as the tokens one by one."""

    _BETWEEN = b"\xff"  # no part of UTF-8

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._ids = [*token_bytes]
        self._text = b"".join(spelling + self._BETWEEN for spelling in token_bytes.values())
        self._starts = [0, *accumulate(len(spelling) + 1 for spelling in token_bytes.values())]

    def holding(self, part: bytes, at_end: bool = False) -> set[int]:
        """Return the tokens that hold a part, or end with it."""
        wanted = part + self._BETWEEN if at_end else part
        return {self._ids[bisect_right(self._starts, at) - 1] for at in self._places(wanted)}

    def _places(self, part: bytes) -> Iterator[int]:
        at = self._text.find(part)
        while at >= 0:
            yield at
            at = self._text.find(part, at + 1)


@dataclass(frozen=True, slots=True)
class _Repetitions:
    """A text of n tokens. `common` [n - 1]: for each place but the last, the number of tokens up to it that are also
    the text's last ones."""

    tokens: Counts
    common: Counts

    @staticmethod
    def of(tokens: Sequence[int]) -> _Repetitions:
        """Return the text of these tokens. Takes linear time (the Z algorithm, on the reversed text)."""
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
        """Return the text with one token more."""
        common = np.ones(len(self.tokens), np.int32)
        common[1:] += self.common
        common *= self.tokens == token
        return _Repetitions(np.append(self.tokens, np.int32(token)), common)


class Dry:
    """Subtracts DRY's penalty. It depends on the tokens before a row alone.

    The committed text is read once and then grows token by token; each drafted path adds its tokens to it.
    """

    def __init__(
        self,
        multiplier: float,
        base: float = 1.75,
        allowed_length: int = 2,
        last_n: int = -1,
        breakers: Breakers | None = None,
    ) -> None:
        """`last_n`: number of last tokens, of prompt and reply, that are looked at; -1: all."""
        self._multiplier, self._base, self._allowed, self._last = multiplier, base, allowed_length, last_n
        self._breakers = breakers or Breakers()
        self._most_exponent = int(_FLOAT32_LOG / math.log(base)) if base > 1.000001 else 2**31 - 1
        self._texts: dict[tuple[int, ...], _Repetitions] = {}
        """The committed text and, by their drafted tokens, longer ones."""
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
        """Return for each token [width] the length of the longest repetition that it would continue, -1 for none."""
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
