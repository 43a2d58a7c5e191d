"""A growing text in two tokenizers: what the target commits as the draft reads it, and the other way round."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from paceline.drafters.vocab_map import VocabMap

_OPEN, _KEPT, _BEFORE = 400, 80, 80
"""Characters: so many may be encoded again with every round, at least so many after the text has been cut, and so many
before them are encoded too, so that no token sees the cut."""
_TRIES = 4
_TAIL = 12
"""Committed target tokens before drafted text, so that it is cut into tokens as the target would cut it there."""
_WORD = re.compile(r"(?<=\S)(?=\s)")


class TokenReader(Protocol):
    """Reads target tokens, a few at a time."""

    ids: list[int]
    """All that was read, in draft tokens."""

    def read(self, tokens: Sequence[int]) -> int:
        """The text goes on with target tokens. Returns how many of the old ids still stand."""
        ...


class Respelled:
    """Token by token: the counterpart of each, or else tokens that say the same. Nothing read ever changes.

    `first`: what to add to every draft id.
    """

    def __init__(self, words: VocabMap, first: int = 0) -> None:
        self._words, self._first = words, first
        self.ids = [first + i for i in words.opening]

    def read(self, tokens: Sequence[int]) -> int:
        stand = len(self.ids)
        for token in tokens:
            self.ids += [self._first + i for i in self._words.respell(token)]
        return stand


class Transcript:
    """As the draft's tokenizer writes the text. What follows may change its last tokens, and only those.

    The cost of a round does not grow with the text: only its end is encoded again, from a place where a token begins
    whatever follows (found by trying), with some characters before it, so that a tokenizer that treats the beginning of
    a text in its own way does so there. Incomplete characters wait for their last byte.
    """

    def __init__(self, words: VocabMap) -> None:
        self._words = words
        self.ids = list(words.opening)
        self._begin()

    def _begin(self) -> None:
        """What has been read by now is settled."""
        self._settled = len(self.ids)
        self._before = self._open = ""
        self._bytes = getincrementaldecoder("utf-8")("replace")

    @property
    def incomplete(self) -> bytes:
        """The first bytes of a character that the target has begun."""
        return self._bytes.getstate()[0]

    def read(self, tokens: Sequence[int]) -> int:
        first, old = self._settled, self.ids[self._settled :]
        for piece in self._words.pieces(tokens):
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
        return first + next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
        )

    def _encode(self) -> None:
        self.ids[self._settled :] = self._tokens(self._open)

    def _tokens(self, text: str) -> list[int]:
        """Draft tokens of a text that stands behind the settled one."""
        encode = self._words.draft.tokenizer.encode
        return encode(self._before + text, special=False)[len(encode(self._before, special=False)) :]

    def _settle(self) -> None:
        """Where much is open, all but the end of it no longer changes."""
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


def continuation(words: VocabMap, text: Sequence[int], drafted: bytes) -> list[int]:
    """Target tokens that continue the target tokens `text` by the bytes `drafted`, as the target would cut them there.

    `drafted` ends with a whole character, and with the text before it begins with one.

    The end of the text is encoded together with what was drafted. A token that holds the last of the one and the first
    of the other is no continuation: what it holds of the draft is spelled anew.
    """
    tail = b"".join(words.said.get(token, b"") for token in text[-_TAIL:])
    encode = words.target.tokenizer.encode
    tokens = encode((tail + drafted).decode(errors="ignore"), special=False)
    found: list[int] = []
    while tokens and drafted:
        said = words.said.get(tokens[-1], b"")
        if not said or not drafted.endswith(said):
            break
        found.insert(0, tokens.pop())
        drafted = drafted[: -len(said)]
    if drafted and tokens and words.said.get(tokens[-1], b"").endswith(drafted):
        return words.speller.spell(drafted) + found
    if drafted:
        # A tokenizer that changes what it reads (lower case, NFC): go by what it makes of the text alone.
        alone, found = encode(tail.decode(errors="ignore"), special=False), tokens + found
        found = found[len(alone) :] if found[: len(alone)] == alone else []
    return list(takewhile(words.said.__contains__, found))
