"""Incremental conversion of a text from one tokenizer to another, at a cost that does not grow with the text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from paceline.drafters.retokenizer import Retokenizer, TokenMapper, continuation
from paceline.drafters.vocab_map import SAMPLE, VocabMap
from paceline.text.tokenizer import Tokenizer
from tests.support.awkward_texts import AWKWARD
from tests.support.cover import cover, some
from tests.support.vocabularies import KINDS, framed, speaker, tokenizer

BYTES = ["byte-level", "byte-level, small", "sentencepiece, no space before"]
RING = list(zip(KINDS, [*list(KINDS)[1:], *list(KINDS)[:1]], strict=True))
TEXTS = [SAMPLE * 2, "\n".join(AWKWARD), "🎉 naïve 中文字符 " * 40, "x" * 900, "word " * 300]


@cache
def words(target: str, draft: str) -> VocabMap:
    return VocabMap(speaker(tokenizer(target)), speaker(tokenizer(draft)))


def chunks(tokens: Sequence[int], seed: int = 0, most: int = 6) -> Iterator[Sequence[int]]:
    chance = random.Random(seed)
    while tokens:
        size = chance.randint(1, most)
        yield tokens[:size]
        tokens = tokens[size:]


@cover(text=dict(zip(("sample", "awkward", "wide", "x", "words"), TEXTS, strict=True)), target=BYTES, draft=BYTES)
def test_a_transcript_read_bit_by_bit_is_the_encoding_of_the_whole(target: str, draft: str, text: str) -> None:
    pair = words(target, draft)
    text = text.replace("<s>", "").replace("</s>", "").replace("<unk>", "").replace("▁", "")
    reader = Retokenizer(pair)
    for chunk in chunks(pair.target.tokenizer.encode(text, special=False)):
        before = list(reader.ids)
        stand = reader.read(chunk)
        assert reader.ids[:stand] == before[:stand]
    assert not reader.incomplete
    assert reader.ids == pair.draft.tokenizer.encode(text, special=False)


@pytest.mark.parametrize(("target", "draft"), [*RING, *(pair[::-1] for pair in RING)])
def test_any_tokens_can_be_read_by_any_tokenizer(target: str, draft: str) -> None:
    """Random tokens are not valid text: they have broken characters and stray special tokens."""
    pair = words(target, draft)
    chance = random.Random(1)
    tokens = chance.choices(range(pair.target.target.vocab_size), k=300)
    for reader in (Retokenizer(pair), TokenMapper(pair)):
        for chunk in chunks(tokens):
            reader.read(chunk)
        assert reader.ids
        assert all(0 <= i < pair.draft.target.vocab_size for i in reader.ids)


@some("draft", [*KINDS], fast=["byte-level, small", "sentencepiece", "word piece", "letters"])
def test_a_round_costs_the_same_however_long_the_text_is(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = words("byte-level", draft)
    tokens = pair.target.tokenizer.encode(SAMPLE * 6, special=False)
    encoded: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, special=True: encoded.append(len(text)) or encode(self, text, special)
    )
    reader = Retokenizer(pair)
    cost = []
    for chunk in chunks(tokens):
        encoded.clear()
        reader.read(chunk)
        cost.append(sum(encoded))
    assert max(cost[len(cost) // 2 :]) < 6000
    assert sum(cost[-50:]) < 2 * sum(cost[50:100])


def test_an_incomplete_character_waits_for_its_last_byte() -> None:
    pair = words("byte-level, small", "byte-level")
    tokens = pair.target.tokenizer.encode("a中", special=False)
    reader = Retokenizer(pair)
    reader.read(tokens[:-1])
    assert reader.ids == pair.draft.tokenizer.encode("a")
    assert reader.incomplete == "中".encode()[: len(reader.incomplete)] != b""
    reader.read(tokens[-1:])
    assert reader.ids == pair.draft.tokenizer.encode("a中")
    assert not reader.incomplete


def test_more_text_changes_only_the_last_tokens() -> None:
    pair = words("byte-level, small", "byte-level")
    reader = Retokenizer(pair)
    reader.read(pair.target.tokenizer.encode("- First, ope"))
    before = list(reader.ids)
    stand = reader.read(pair.target.tokenizer.encode("n"))
    assert 0 < stand < len(before)
    assert reader.ids == pair.draft.tokenizer.encode("- First, open")


def test_ends_are_ends_and_beginnings_the_drafts_own() -> None:
    ours, theirs, bare = framed(tokenizer("byte-level")), framed(tokenizer("sentencepiece")), tokenizer("letters")
    begin = theirs.vocabulary["<s>"]
    for target, draft, opening in ((ours, theirs, [begin]), (ours, bare, []), (bare, theirs, [begin])):
        pair = VocabMap(speaker(target), speaker(draft))
        over, end = target.vocabulary["</s>"], draft.vocabulary["</s>"]
        assert pair.special[over] == end
        for reader in (Retokenizer(pair), TokenMapper(pair)):
            reader.read(pair.without_opening([*target.encode("why"), over, *target.encode("not", special=False)]))
            before, after = reader.ids[: reader.ids.index(end)], reader.ids[reader.ids.index(end) + 1 :]
            assert before[: len(opening)] == opening
            assert draft.decode(before[len(opening) :]).strip() == "why"
            assert draft.decode(after).strip() == "not"


@pytest.mark.parametrize("target", BYTES)
@pytest.mark.parametrize("text", [SAMPLE, *TEXTS[1:3]])
def test_drafted_text_is_cut_into_the_targets_own_tokens(target: str, text: str) -> None:
    pair = words(target, "letters")
    text = text.replace("<s>", "").replace("</s>", "").replace("<unk>", "").replace("▁", "")
    tokens = pair.target.tokenizer.encode(text, special=False)
    cuts = range(0, len(tokens) - 5, 3)
    right = 0
    for at in cuts:
        before = b"".join(pair.target_bytes[i] for i in tokens[:at])
        whole = before + b"".join(pair.target_bytes[i] for i in tokens[at : at + 6])
        drafted = whole.decode(errors="ignore").encode().removeprefix(before)
        found = continuation(pair, tokens[:at], drafted)
        assert b"".join(pair.target_bytes[i] for i in found) == drafted
        right += found[:2] == tokens[at : at + 2]
    assert right > 0.95 * len(cuts)


def test_a_draft_inside_a_word_continues_the_word() -> None:
    """The target has begun a word with other tokens than it would use for the word with the draft."""
    pair = words("byte-level", "letters")
    assert len(pair.target.tokenizer.encode(" value", special=False)) == 1
    (begun,) = pair.target.tokenizer.encode(" val", special=False)[:1]
    rest = b" value".removeprefix(pair.target_bytes[begun])
    assert continuation(pair, [begun], rest) == pair.speller.spell(rest) != []
    found = continuation(pair, [begun], rest + b" the")
    assert found == [*pair.speller.spell(rest), *pair.target.tokenizer.encode(" the", special=False)]


def test_a_target_that_changes_what_it_reads_gets_drafts_too() -> None:
    pair = words("word piece", "byte-level")
    ours = pair.target.tokenizer
    assert continuation(pair, ours.encode("the quick"), b" ANSWER") == ours.encode("answer")
