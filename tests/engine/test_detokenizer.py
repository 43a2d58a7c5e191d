from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.detokenizer import Detokenizer, StopStrings, TextStream
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, Verdict
from tests.support import vocabularies


def byte_decode(ids: Sequence[int]) -> str:
    """Decode with a byte-level tokenizer: token i is byte i."""
    return bytes(ids).decode("utf-8", errors="replace")


def spaced_decode(ids: Sequence[int]) -> str:
    """Decode like SentencePiece: every token begins with a space, but the text does not."""
    return " ".join(f"w{i}" for i in ids)


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@given(st.text(max_size=20), st.sampled_from([byte_decode]))
def test_pieces_join_to_the_text_and_never_break_a_character(text: str, decode: object) -> None:
    stream = Detokenizer(byte_decode)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.flush() == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)


@given(st.lists(st.sampled_from([*"aé中🎉".encode(), 0xFF]) | st.integers(0, 255), max_size=60))
def test_even_broken_bytes_join_to_what_the_tokenizer_says(ids: list[int]) -> None:
    stream = Detokenizer(byte_decode)
    assert "".join(map(stream.push, ids)) + stream.flush() == byte_decode(ids)


@pytest.mark.parametrize("kind", vocabularies.KINDS)
@given(parts=st.lists(st.sampled_from(["a", " b", "é", "中", "🎉", "\ufffd", " \ufffd", "</s>"]), max_size=40))
def test_real_tokenizers_read_the_same_piece_by_piece(kind: str, parts: list[str]) -> None:
    words = vocabularies.tokenizer(kind)
    end = words.vocabulary["</s>"]
    ids = [token for part in parts for token in ([end] if part == "</s>" else words.encode(part, special=False))]
    ids[1:1] = [end] * 20  # inside the first character, perhaps
    stream = Detokenizer(words.decode)
    assert "".join(map(stream.push, ids)) + stream.flush() == words.decode(ids)


@pytest.mark.parametrize("token", [0xFF, 0xF0, 256])
def test_tokens_that_never_complete_a_character_are_not_decoded_repeatedly(token: int) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_decode([i for i in ids if i < 256])

    stream = Detokenizer(decode)
    shown = "".join(stream.push(token) for _ in range(500))
    assert longest <= 32
    assert shown + stream.flush() == byte_decode([token] * 500 if token < 256 else [])


@given(st.lists(st.integers(0, 99), max_size=12))
def test_tokens_that_read_differently_at_the_start(ids: list[int]) -> None:
    stream = Detokenizer(spaced_decode)
    assert "".join(map(stream.push, ids)) + stream.flush() == spaced_decode(ids)


@given(st.lists(st.text("ab", max_size=4), max_size=10), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_at_the_first_match_however_the_text_arrives(parts: list[str], stops: list[str]) -> None:
    scan = StopStrings(stops)
    shown, stopped = "", False
    for part in parts:
        safe, stopped = scan.push(part)
        shown += safe
        if stopped:
            break
    else:
        shown += scan.flush()
    text = "".join(parts)
    hits = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(hits)
    if not hits:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)


def replies(
    tokens: list[int], sampling: Sampling, blocks: list[int], eos: tuple[int, ...] = ()
) -> tuple[str, list[int], str | None]:
    """Feed the tokens in verdicts of the given sizes. Return (text, token ids, finish reason)."""
    stream = TextStream(sampling, eos, letters, 1000)
    text, ids, at = "", [], 0
    for size in blocks:
        part = tuple(tokens[at : at + size])
        verdict = stream.trim(Verdict(tuple(range(1, len(part))), part), Draft(), torch.empty(0))
        chunks = stream.emit(verdict)
        text += "".join(c.text for c in chunks)
        ids += [c.token_id for c in chunks]
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert [c.drafted for c in chunks] == [i < len(verdict.path) for i in range(len(chunks))]
        if verdict.finish:
            return text, ids, chunks[-1].finish_reason
        at += size
    return text, ids, None


CASES = [
    (Sampling(max_new_tokens=7), (), "length"),
    (Sampling(stop="fg"), (), "stop"),
    (Sampling(stop=["zz", "ef", "cdefg"]), (), "stop"),
    (Sampling(stop_token_ids=[ord("e")]), (), "stop"),
    (Sampling(), (ord("h"), ord("d")), "eos"),
    (Sampling(ignore_eos=True, max_new_tokens=9), (ord("d"),), "length"),
    (Sampling(max_new_tokens=6, stop="fgh"), (), "length"),
    (Sampling(stop_when=lambda ids, text: len(ids) == 5), (), "stop"),
    (Sampling(stop_when=[lambda ids, text: False, lambda ids, text: text.endswith("def")]), (), "stop"),
    (Sampling(stop_when=lambda ids, text: ids[-1] == ord("d"), max_new_tokens=4), (), "stop"),
    (Sampling(stop_when=lambda ids, text: len(ids) == 5, stop="cd"), (), "stop"),
    (Sampling(stop_when=lambda ids, text: len(ids) == 4), (ord("d"),), "eos"),
]


@pytest.mark.parametrize(("sampling", "eos", "finish"), CASES)
@given(data=st.data())
def test_a_reply_ends_at_the_same_token_whatever_the_blocks(
    sampling: Sampling, eos: tuple[int, ...], finish: str, data: st.DataObject
) -> None:
    tokens = list(map(ord, "abcdefghij"))
    blocks = data.draw(st.lists(st.integers(1, 6), min_size=10, max_size=10))
    plain = replies(tokens, sampling, [1] * 10, eos)
    assert plain[2] == finish
    assert replies(tokens, sampling, blocks, eos) == plain


def test_the_end_of_a_reply_is_shown_without_its_stop_string() -> None:
    tokens = list(map(ord, "abcdefghij"))
    assert replies(tokens, Sampling(stop="fg"), [4, 6]) == ("abcde", tokens[:7], "stop")
    assert replies(tokens, Sampling(stop_token_ids=[ord("c")]), [6, 4])[:2] == ("ab", tokens[:3])
    assert replies(tokens, Sampling(max_new_tokens=6, stop="fgh"), [10])[0] == "abcdef", "held text is not lost"
    assert replies(tokens, Sampling(), [10], (ord("d"),)) == ("abc", tokens[:4], "eos")


def test_a_criterion_sees_every_token_once_in_order_and_none_after_the_end() -> None:
    seen: list[tuple[list[int], str]] = []

    def watch(ids: Sequence[int], text: str) -> bool:
        seen.append((list(ids), text))
        return len(ids) == 5

    tokens = list(map(ord, "abcdefghij"))
    sampling = Sampling(stop_when=watch, stop="cx")
    assert replies(tokens, sampling, [2, 6, 2]) == ("abcde", tokens[:5], "stop"), "what was held back is shown"
    assert seen == [(tokens[:n], "abcdefghij"[:n]) for n in range(1, 6)]


def test_token_ids_are_not_copied_in_every_round() -> None:
    seen: list[Sequence[int]] = []
    stream = TextStream(Sampling(stop_when=lambda ids, text: bool(seen.append(ids))), (), letters, 1000)
    for tokens in ([97, 98], [99], [100, 101, 102]):
        for attempt in ([90], tokens):  # only the second attempt of each round is committed
            verdict = stream.trim(Verdict(tuple(range(1, len(attempt))), tuple(attempt)), Draft(), torch.zeros(4, 128))
        stream.emit(verdict)
    assert len({id(ids) for ids in seen}) == 1
    assert seen[-1] == [97, 98, 99, 100, 101, 102]


def test_logprobs_come_from_the_row_before_the_token() -> None:
    stream = TextStream(Sampling(logprobs=2), (), letters, 1000)
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).double()
    verdict = stream.trim(Verdict((2, 4), (3, 1, 8)), Draft(), logits)
    chunks = stream.emit(verdict)
    for chunk, row, token in zip(chunks, (0, 2, 4), (3, 1, 8), strict=True):
        expected = logits[row].log_softmax(-1)
        assert chunk.logprobs is not None
        assert chunk.logprobs.chosen == pytest.approx(float(expected[token]))
        likeliest = sorted(range(9), key=lambda i: -expected[i])[:2]
        assert [token for token, _ in chunk.logprobs.top] == likeliest
        assert [p for _, p in chunk.logprobs.top] == pytest.approx([float(expected[i]) for i in likeliest])
    assert stream.emit(stream.trim(Verdict((), ()), Draft(), logits)) == [], "a round that failed"


def test_no_logprobs_unless_asked_for_and_none_but_the_tokens_own_for_zero() -> None:
    for asked, expected in ((None, None), (0, ())):
        stream = TextStream(Sampling(logprobs=asked), (), letters, 1000)
        (chunk,) = stream.emit(stream.trim(Verdict((), (3,)), Draft(), torch.zeros(1, 9)))
        assert (chunk.logprobs and chunk.logprobs.top) == expected


def test_a_verdict_that_is_trimmed_and_not_emitted_changes_nothing() -> None:
    """A round that fails before its commit is run again."""
    stream = TextStream(Sampling(stop="fgh", max_new_tokens=8), (), letters, 1000)
    for part in ("abe", "fg", "xyz"):
        verdict = Verdict(tuple(range(1, len(part))), tuple(map(ord, part)))
        left = stream.left
        first = stream.trim(verdict, Draft(), torch.empty(0))
        assert stream.left == left
        again = stream.trim(verdict, Draft(), torch.empty(0))
        assert again.chunks == first.chunks
        assert stream.emit(again) == list(first.chunks)
        assert stream.left == left - len(part)


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize(
    ("reasoning", "text", "shown"),
    [
        (("<t>", "</t>"), "\n<t>a STOP</t>b STOP c", "\n<t>a STOP</t>b "),
        (("<t>", "</t>"), " STOP <t>", " "),
        (("<t>", "</t>"), "<t>a STOP", "<t>a STOP"),
        (("<t>", "</t>"), "<tSTOP", "<t"),
        (("<t>", "</t>"), "<t></t>STOP", "<t></t>"),
        (("<t>", "</t>"), "<", "<"),
        (("", "</t>"), "a STOP</t></t>STOP", "a STOP</t></t>"),
        (("<c>", "<c>f"), "<c>a STOP<c>f STOP", "<c>a STOP<c>f "),
        (("<c>", "<c>f"), "<c>fSTOP", "<c>f"),
        ((), "<t>a STOP", "<t>a "),
    ],
)
def test_stop_strings_do_not_count_in_reasoning(reasoning: tuple[str, ...], text: str, shown: str, step: int) -> None:
    scan, found = StopStrings(("STOP",), reasoning), ""
    for at in range(0, len(text), step):
        piece, stopped = scan.push(text[at : at + step])
        found += piece
        if stopped:
            break
    else:
        found += scan.flush()
    assert found == shown


def test_reasoning_may_begin_and_end_with_special_tokens() -> None:
    scan = StopStrings(("x",), ("<t>", "</t>"), {1: "<t>", 2: "</t>"})
    pieces = [scan.push(text, token) for text, token in (("\n", 5), ("", 1), ("x", 6), ("", 2), ("y", 7), ("x", 6))]
    assert pieces == [("", False), ("\n", False), ("x", False), ("", False), ("y", False), ("", True)]
