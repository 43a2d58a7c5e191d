"""Conversion of a growing text between two tokenizers: committed tokens for the draft model, drafts for the target."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import takewhile, zip_longest
from typing import Protocol

from paceline.drafters.vocab_map import VocabMap

_MAX_OPEN, _MIN_OPEN, _CONTEXT = 400, 80, 80
"""Lengths in characters: the maximum that is encoded again in each round, the minimum that stays open after a cut, and
the context that is encoded before the open part so that no token depends on the cut."""
_MAX_CUTS = 4
"""Number of cuts to try at spaces, and number of cuts to try at arbitrary characters if no space will do."""
_COMMITTED_TOKENS = 12
"""Number of committed target tokens that are encoded together with drafted text, so that the text is tokenized as their
continuation."""
_WORD_END = re.compile(r"(?<=\S)(?=\s)")


class TokenReader(Protocol):
    """Reads target tokens, a few at a time, and converts them to draft tokens."""

    ids: list[int]
    """The draft tokens for everything that has been read."""

    def read(self, tokens: Sequence[int]) -> int:
        """Read more target tokens, and update `ids`. Return how many of the previous ids, counted from the start, are
        unchanged."""
        ...


class TokenMapper:
    """A reader that maps each target token to the same draft token, or to several draft tokens with the same bytes. Its
    ids never change later.

    Args:
        vocab_map: The mapping between the vocabularies.
        first: Offset that is added to every draft id.
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
    """A reader that encodes the text with the draft model's tokenizer. Only the ids near the end may change later.

    The cost of a round does not grow with the text, because only the end of the text is encoded again. This end begins
    at a cut: a place in the text such that later text does not change the tokens before it. Cuts are found by trial.
    Some characters before the cut are encoded as well, because tokenizers may treat the beginning of a text
    differently. Incomplete characters wait for their last byte.
    """

    def __init__(self, vocab_map: VocabMap) -> None:
        self._vocab_map = vocab_map
        self.ids = list(vocab_map.opening)
        self._begin()

    def _begin(self) -> None:
        """Settle all tokens that have been read so far. Settled tokens never change."""
        self._settled = len(self.ids)
        self._before = self._open = ""
        self._bytes = getincrementaldecoder("utf-8")("replace")

    @property
    def incomplete(self) -> bytes:
        """The first bytes of a character that is not complete yet."""
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
        """If the open part is long, settle everything except its end."""
        if len(self._open) <= _MAX_OPEN:
            return
        last = len(self._open) - _MIN_OPEN
        spaces = [hit.start() for hit in _WORD_END.finditer(self._open, max(0, last - _MIN_OPEN), last)]
        for cut in [*spaces[: -_MAX_CUTS - 1 : -1], *range(last, last - _MAX_CUTS, -1)]:
            tokens = self._tokens(self._open[:cut])
            end = self._settled + len(tokens)
            if self.ids[self._settled : end] == tokens:
                break
        self._settled = end
        self._before = (self._before + self._open[:cut])[-_CONTEXT:]
        self._open = self._open[cut:]


def continuation(vocab_map: VocabMap, text: Sequence[int], drafted: bytes) -> list[int]:
    """Encode drafted text as target tokens that continue a text.

    The end of the text is encoded together with `drafted`. If a token spans both, the part that belongs to `drafted` is
    spelled in other tokens.

    Args:
        vocab_map: The mapping between the vocabularies.
        text: Target tokens of the text.
        drafted: Bytes that follow the text. They end with a complete character, and text and bytes together are valid
            UTF-8.

    Returns:
        The target tokens.
    """
    tail = b"".join(vocab_map.target_bytes.get(token, b"") for token in text[-_COMMITTED_TOKENS:])
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
        # The tokenizer normalises text (lower case, NFC), so bytes do not match. Compare with the tokens of the tail
        # without `drafted` instead.
        before, found = encode(tail.decode(errors="ignore"), special=False), tokens + found
        found = found[len(before) :] if found[: len(before)] == before else []
    return list(takewhile(vocab_map.target_bytes.__contains__, found))
