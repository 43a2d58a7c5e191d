"""A growing text in two tokenizers: committed target tokens for the draft model, drafted text for the target."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import takewhile, zip_longest
from typing import Protocol

from paceline.drafters.vocab_map import VocabMap

_OPEN, _KEPT, _BEFORE = 400, 80, 80
"""Characters: the most that are encoded again each round, the least that stay open after a cut, and the context encoded
before them, so that no token depends on the cut."""
_TRIES = 4
_TAIL = 12
"""Committed target tokens encoded before drafted text, so that it is tokenized as it would be there."""
_WORD = re.compile(r"(?<=\S)(?=\s)")


class TokenReader(Protocol):
    """Reader of target tokens, a few at a time."""

    ids: list[int]
    """Draft tokens of everything read."""

    def read(self, tokens: Sequence[int]) -> int:
        """Read further target tokens. Return how many of the old ids are still valid."""
        ...


class TokenMapper:
    """Reader that maps token by token: to the same token, or to several with the same bytes. Read ids never change.

    `first`: offset added to every draft id.
    """

    def __init__(self, vocab_map: VocabMap, first: int = 0) -> None:
        self._vocab_map, self._first = vocab_map, first
        self.ids = [first + i for i in vocab_map.opening]

    def read(self, tokens: Sequence[int]) -> int:
        valid = len(self.ids)
        for token in tokens:
            self.ids += [self._first + i for i in self._vocab_map.respell(token)]
        return valid


class Retokenizer:
    """Reader that encodes the text with the draft's tokenizer. Further text may change its last tokens, and only those.

    The cost of a round does not grow with the text: only its end is encoded again, from a place where a token begins
    whatever follows (found by trying). Some characters before it are encoded too, for tokenizers that treat the
    beginning of a text differently. Incomplete characters wait for their last byte.
    """

    def __init__(self, vocab_map: VocabMap) -> None:
        self._vocab_map = vocab_map
        self.ids = list(vocab_map.opening)
        self._begin()

    def _begin(self) -> None:
        """Settle everything read so far."""
        self._settled = len(self.ids)
        self._before = self._open = ""
        self._bytes = getincrementaldecoder("utf-8")("replace")

    @property
    def incomplete(self) -> bytes:
        """First bytes of a character whose rest is still to come."""
        return self._bytes.getstate()[0]

    def read(self, tokens: Sequence[int]) -> int:
        first, old = self._settled, self.ids[self._settled :]
        for piece in self._vocab_map.pieces(tokens):
            if isinstance(piece, bytes):
                self._open += self._bytes.decode(piece)
                continue
            self._open += self._bytes.decode(b"", True)
            self._encode()
            self.ids.append(piece)
            self._begin()
        self._encode()
        new = self.ids[first:]
        self._settle()
        return first + next((i for i, (a, b) in enumerate(zip_longest(old, new)) if a != b), len(old))

    def _encode(self) -> None:
        self.ids[self._settled :] = self._tokens(self._open)

    def _tokens(self, text: str) -> list[int]:
        """Return the draft tokens of `text` after the settled part."""
        encode = self._vocab_map.draft.tokenizer.encode
        return encode(self._before + text, special=False)[len(encode(self._before, special=False)) :]

    def _settle(self) -> None:
        """Settle all but the end of a long open part."""
        if len(self._open) <= _OPEN:
            return
        last = len(self._open) - _KEPT
        spaces = [hit.start() for hit in _WORD.finditer(self._open, max(0, last - _KEPT), last)]
        for cut in [*spaces[: -_TRIES - 1 : -1], *range(last, last - _TRIES, -1)]:
            tokens = self._tokens(self._open[:cut])
            end = self._settled + len(tokens)
            if self.ids[self._settled : end] == tokens:
                break
        self._settled = end
        self._before = (self._before + self._open[:cut])[-_BEFORE:]
        self._open = self._open[cut:]


def continuation(vocab_map: VocabMap, text: Sequence[int], drafted: bytes) -> list[int]:
    """Return target tokens that continue the target tokens `text` by the bytes `drafted`, tokenized as in the text.

    `drafted` ends with a whole character, and begins with one given the text before it.

    The end of the text is encoded together with `drafted`. A token that spans both cannot continue the text: its share
    of `drafted` is spelled in other tokens.
    """
    tail = b"".join(vocab_map.target_bytes.get(token, b"") for token in text[-_TAIL:])
    encode = vocab_map.target.tokenizer.encode
    tokens = encode((tail + drafted).decode(errors="ignore"), special=False)
    found: list[int] = []
    while tokens and drafted:
        piece = vocab_map.target_bytes.get(tokens[-1], b"")
        if not piece or not drafted.endswith(piece):
            break
        found.insert(0, tokens.pop())
        drafted = drafted[: -len(piece)]
    if drafted and tokens and vocab_map.target_bytes.get(tokens[-1], b"").endswith(drafted):
        return vocab_map.speller.spell(drafted) + found
    if drafted:
        # A tokenizer that normalises (lower case, NFC): compare with its tokens of the text alone.
        alone, found = encode(tail.decode(errors="ignore"), special=False), tokens + found
        found = found[len(alone) :] if found[: len(alone)] == alone else []
    return list(takewhile(vocab_map.target_bytes.__contains__, found))
