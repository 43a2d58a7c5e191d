"""What each token of a vocabulary adds to a text, in bytes: what tokens of different tokenizers can be compared by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def surfaces(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Token id -> the bytes that it adds in the middle of a text; without the tokens that `decode` leaves out.

    In the order of ids, but byte tokens last: of two tokens with the same bytes a tokenizer writes the first.

    A byte-level vocabulary spells bytes as letters ("Ġ" is a space). Of any other the decoder knows how it is written:
    its "▁", "##" or "</w>" are looked up by decoding every token behind another one. "<0x0A>" is the byte 10 wherever
    the decoder takes it for one.
    """
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    words = {i: t for t, i in sorted(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1))}
    words = {i: word for i, word in words.items() if i not in special}
    decoder = backend.decoder
    if decoder and decoder.decode(["Ġ", "Ċ"]) == " \n":
        return {i: _from_letters(word) for i, word in words.items()}
    found = _behind_another(backend, words)
    if decoder and decoder.decode(["<0x41>"]) == "A":
        single = {i: bytes.fromhex(hit[1]) for i, word in words.items() if (hit := _BYTE.fullmatch(word))}
        found = {i: said for i, said in found.items() if i not in single} | single
    return found


def _from_letters(word: str) -> bytes:
    """The bytes of a byte-level token; an added one may be spelled as it is."""
    letters = _letters()
    known = [letters.get(letter, -1) for letter in word]
    return word.encode(errors="replace") if -1 in known else bytes(known)


@lru_cache
def _letters() -> Mapping[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 for itself, the other bytes in order from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _behind_another(backend: tokenizers.Tokenizer, words: Mapping[int, str]) -> dict[int, bytes]:
    """Each token's share of a decoded pair, in which it stands behind a plain word."""
    anchor = next((i for i, word in words.items() if word.isalpha() and backend.decode([i])), None)
    before = [] if anchor is None else [anchor]
    start = len(backend.decode(before))
    pairs = backend.decode_batch([[*before, i] for i in words], skip_special_tokens=False)
    return {i: text[start:].encode(errors="replace") for i, text in zip(words, pairs, strict=True)}


_COMPOSE = 4
"""Characters of a text that Unicode normalisation makes one of, at most."""
_SHRINK = {"NFC": _COMPOSE, "NFKC": _COMPOSE, "NFD": 1, "NFKD": 1, "Prepend": 1, "Lowercase": 1}
"""Kinds of normalizers that drop nothing -> how many times shorter they make a text, in characters."""
_KEEP = ("ByteLevel", "Metaspace", "Digits", "Split")
"""Kinds of pre-tokenizers that drop nothing, `Split` unless it is told to."""


def longest(backend: tokenizers.Tokenizer, said: Mapping[int, bytes]) -> int | None:
    """The most characters of a text that one token can stand for; None where a token may swallow any number.

    `said`: what each token adds to a text. A text is never longer than this times its number of tokens.
    """
    special = backend.get_added_tokens_decoder().values()
    byte_level = bool(backend.decoder) and backend.decoder.decode(["Ġ", "Ċ"]) == " \n"
    whole = byte_level or getattr(backend.model, "byte_fallback", False)
    if not whole or any(token.lstrip or token.rstrip for token in special):
        return None
    shrink = 1
    for kind, state in _steps(backend.normalizer):
        if kind == "Replace" and len(state["pattern"].get("String", "")) > len(state["content"]):
            return None
        if kind == "Replace" and "String" not in state["pattern"]:
            return None
        if kind != "Replace" and kind not in _SHRINK:
            return None
        shrink *= _SHRINK.get(kind, 1)
    for kind, state in _steps(backend.pre_tokenizer):
        if kind not in _KEEP or state.get("behavior") == "Removed":
            return None
    return shrink * max([*map(len, said.values()), *(len(token.content) for token in special)], default=1)


def _steps(part: Any) -> list[tuple[str, dict[str, Any]]]:
    """The kind and settings of a normalizer or pre-tokenizer, of each of its steps if it has several."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps = state.get("normalizers") or state.get("pretokenizers") or [state]
    return [(step["type"], step) for step in steps]


class Speller:
    """Writes bytes with the tokens of a vocabulary, the longest that fits first."""

    def __init__(self, ids: dict[bytes, int]) -> None:
        """`ids`: what each token adds to a text -> its id."""
        self._ids = ids
        self._longest = max(map(len, ids), default=0)

    def spell(self, said: bytes) -> list[int]:
        """Token ids that say `said`, up to the first byte that no token says."""
        tokens: list[int] = []
        while said:
            sizes = range(min(len(said), self._longest), 0, -1)
            size = next((n for n in sizes if said[:n] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[said[:size]])
            said = said[size:]
        return tokens
