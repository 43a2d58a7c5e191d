"""The bytes that each token adds to a text. They are used to compare the tokens of different tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Return, for each token except special tokens, token id -> the bytes that the token adds in the middle of a text.

    Tokens are sorted by id, with byte tokens last. If two tokens have the same bytes, a tokenizer uses the first of
    them.

    A byte-level vocabulary spells bytes as letters ("Ġ" is a space). In all other vocabularies, each token is decoded
    after another token, because only the decoder knows the meaning of "▁", "##" or "</w>". "<0x0A>" is the byte 10 if
    the decoder supports such tokens.
    """
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1))
    tokens = {i: token for token, i in vocabulary if i not in special}
    if _decodes(backend, ["Ġ", "Ċ"], " \n"):
        return {i: _from_letters(token) for i, token in tokens.items()}
    found = _decoded_in_pairs(backend, tokens)
    if _decodes(backend, ["<0x41>"], "A"):
        single = {i: bytes.fromhex(hit[1]) for i, token in tokens.items() if (hit := _BYTE.fullmatch(token))}
        found = {i: data for i, data in found.items() if i not in single} | single
    return found


def _decodes(backend: tokenizers.Tokenizer, tokens: list[str], text: str) -> bool:
    return bool(backend.decoder) and backend.decoder.decode(tokens) == text


def _from_letters(token: str) -> bytes:
    """Return the bytes of a byte-level token. Added tokens may be spelled as plain text."""
    letters = _letters()
    known = [letters.get(letter, -1) for letter in token]
    return token.encode(errors="replace") if -1 in known else bytes(known)


@lru_cache
def _letters() -> Mapping[str, int]:
    """Return GPT-2's mapping letter -> byte. Printable Latin-1 characters stand for themselves. The letters for all
    other bytes start at U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _decoded_in_pairs(backend: tokenizers.Tokenizer, tokens: Mapping[int, str]) -> dict[int, bytes]:
    """Decode each token after a plain word, and return the token's part of the text."""
    anchor = next((i for i, token in tokens.items() if token.isalpha() and backend.decode([i])), None)
    before = [] if anchor is None else [anchor]
    start = len(backend.decode(before))
    pairs = backend.decode_batch([[*before, i] for i in tokens], skip_special_tokens=False)
    return {i: text[start:].encode(errors="replace") for i, text in zip(tokens, pairs, strict=True)}


_SHRINK = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}
"""Normalizers that remove nothing -> the maximum factor by which they shorten a text. Unicode composition merges at
most four characters."""
_KEEP = ("ByteLevel", "Metaspace", "Digits", "Split")
"""Pre-tokenizers that remove nothing (`Split` only with some settings)."""


def max_token_chars(backend: tokenizers.Tokenizer, token_bytes: Mapping[int, bytes]) -> int | None:
    """Return the maximum number of characters of a text that a token can stand for, or None if there is no limit.

    A text is never longer than this number times its number of tokens. `token_bytes`: The bytes of each token.
    """
    special = backend.get_added_tokens_decoder().values()
    whole = _decodes(backend, ["Ġ", "Ċ"], " \n") or getattr(backend.model, "byte_fallback", False)
    if not whole or any(token.lstrip or token.rstrip for token in special):
        return None
    shrink = 1
    for kind, state in _steps(backend.normalizer):
        if kind == "Replace":
            replaced = state["pattern"].get("String")
            if replaced is None or len(replaced) > len(state["content"]):
                return None
        elif kind not in _SHRINK:
            return None
        shrink *= _SHRINK.get(kind, 1)
    for kind, state in _steps(backend.pre_tokenizer):
        if kind not in _KEEP or state.get("behavior") == "Removed":
            return None
    return shrink * max([*map(len, token_bytes.values()), *(len(token.content) for token in special)], default=1)


def _steps(part: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the settings of each step of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps = state.get("normalizers") or state.get("pretokenizers") or [state]
    return [(step["type"], step) for step in steps]


class Speller:
    """Spells bytes with the tokens of a vocabulary, always using the longest token that fits.

    Attributes:
        ids: Bytes -> token id. If two tokens have the same bytes, it contains the first of them.
    """

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        """Use the tokens of `token_bytes`, token id -> bytes."""
        self.ids = {data: i for i, data in reversed(token_bytes.items())}
        self._longest = max(map(len, self.ids), default=0)

    def spell(self, data: bytes) -> list[int]:
        """Return token ids that spell `data`. They stop at the first byte that no token contains."""
        tokens: list[int] = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((n for n in sizes if data[:n] in self.ids), 0)
            if not size:
                break
            tokens.append(self.ids[data[:size]])
            data = data[size:]
        return tokens
