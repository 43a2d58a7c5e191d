"""The bytes that tokens add to a text, for all kinds of tokenizers."""

from __future__ import annotations

import pytest
import tokenizers

from paceline.drafters.vocab_map import SAMPLE
from paceline.text.tokenizer import Tokenizer
from tests.support.awkward_texts import AWKWARD
from tests.support.vocabularies import KINDS, tokenizer

EXACT = [kind for kind in KINDS if kind not in ("word piece", "unigram", "letters")]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("text", [SAMPLE, *AWKWARD])
def test_the_surfaces_of_a_texts_tokens_join_to_its_bytes(kind: str, text: str) -> None:
    words = tokenizer(kind)
    text = text.replace("<s>", "").replace("</s>", "").replace("<unk>", "").replace("▁", "")
    if "NFC" in kind:
        text = "".join(c for c in text if c.isascii())
    said = b"".join(words.token_bytes[i] for i in words.encode(text, special=False))
    # Some begin every text with a space.
    assert said.lstrip(b" ") == text.encode().lstrip(b" ")


@pytest.mark.parametrize("kind", ["word piece", "unigram", "letters"])
def test_surfaces_are_what_decoding_shows(kind: str) -> None:
    words = tokenizer(kind)
    ids = words.encode("the quick answer is one of the best", special=False)
    assert b"".join(words.token_bytes[i] for i in ids).decode().strip() == words.decode(ids).strip()


def test_word_pieces_start_or_continue_a_word() -> None:
    words = tokenizer("word piece")
    assert words.token_bytes[words.vocabulary["the"]] == b" the"
    assert words.token_bytes[words.vocabulary["##e"]] == b"e"


def test_special_tokens_say_nothing() -> None:
    for kind in KINDS:
        words = tokenizer(kind)
        assert not words.token_bytes.keys() & words.special_ids
        assert words.token_bytes.keys() | words.special_ids == set(words.vocabulary.values())


def test_of_two_tokens_that_say_the_same_the_byte_comes_last() -> None:
    words = tokenizer("sentencepiece")
    ids = [i for i, said in words.token_bytes.items() if said == b"a"]
    assert ids == [words.vocabulary["a"], words.vocabulary["<0x61>"]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("word piece", "letters")])
def test_a_text_is_spelled_in_tokens_that_say_it_and_nothing_else(kind: str) -> None:
    words = tokenizer(kind)
    for text in ("the best", "he", " of it", "values)", "</s>", "One <s> two", "nothing, she said, is", "\n", ""):
        ids = words.spell(text)
        said = b"".join(words.token_bytes[i] for i in ids).decode()
        assert said == text or (text.startswith(said) and kind in ("unigram", "letters"))
        assert words.special_ids.isdisjoint(ids)
    if kind.startswith("byte-level") and "space" not in kind:
        assert words.spell("the best one") == words.encode("the best one", special=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [SAMPLE, "aaaa" * 500, " " * 999, "e\u0301" * 300, "</s>" * 50, "한" * 99, *AWKWARD])
def test_no_token_stands_for_more_characters_than_the_longest(kind: str, text: str) -> None:
    words = tokenizer(kind)
    if words.max_token_chars is not None:
        assert len(text) <= words.max_token_chars * len(words.encode(text, special=False))
    assert (words.max_token_chars is None) == (kind in ("word piece", "unigram", "letters"))


def test_tokens_that_swallow_spaces_have_no_bound() -> None:
    words = tokenizer("byte-level")
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)])
    assert len(backend.encode("<|end|>" + " " * 999, add_special_tokens=False).ids) == 1
    assert Tokenizer(backend).max_token_chars is None
