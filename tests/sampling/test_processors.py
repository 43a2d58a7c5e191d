"""Every processor equals the processor of that name in transformers (or OpenAI's formula), at any split of the prefix
into text and drafted path. Whole replies equal transformers' replies with any draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import InvalidOption, NonFiniteLogits, NoTokenLeft
from paceline.models.decoder import Decoder
from paceline.sampling.noise import Noise
from paceline.sampling.parameters import Sampling, Vocabulary
from paceline.sampling.processors import (
    BadWords,
    CountPenalty,
    LogitBias,
    MinNewTokens,
    NoRepeatNGram,
    RepetitionPenalty,
    spellings,
)
from paceline.sampling.sampler import LogitsProcessor, Prefix, Sampler
from paceline.testing import Oracle, run
from paceline.types import DraftBudget
from tests.support import golden_replies
from tests.support.cover import cover
from tests.support.golden_replies import KNOBS, PROMPTS

V = 12
texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=30)
seeds = st.integers(0, 1000)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Import transformers' processors, in the first test that compares with them."""
    return pytest.importorskip("transformers.generation.logits_process")


def row_of(seed: int, width: int = V) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 4


def check(processor: LogitsProcessor, reference: Callable[[list[int], Tensor], Tensor], data: st.DataObject) -> None:
    """Process rows at drafted paths in rounds of a growing text. Each result must equal a run on the whole prefix."""
    text = data.draw(texts)
    prompt = len(text)
    for _ in range(3):
        for path in ([], *data.draw(st.lists(st.lists(st.integers(0, V - 1), max_size=5), max_size=3))):
            row = row_of(data.draw(seeds), data.draw(st.sampled_from([V, V, V - 3])))
            ours = processor(Prefix(text, path, prompt), row.clone())
            wide = torch.cat([row, torch.zeros(V - len(row))])
            assert torch.equal(ours, reference([*text, *path], wide)[: len(row)])
        text += data.draw(texts)


@given(st.sampled_from([1.3, 0.7, 2.0]), st.data())
def test_repetition_penalty(theirs: Any, penalty: float, data: st.DataObject) -> None:
    reference = theirs.RepetitionPenaltyLogitsProcessor(penalty)
    check(RepetitionPenalty(penalty), lambda ids, row: reference(torch.tensor([ids]), row[None])[0], data)


@given(st.integers(1, 5), st.data())
def test_no_repeat_ngram(theirs: Any, size: int, data: st.DataObject) -> None:
    reference = theirs.NoRepeatNGramLogitsProcessor(size)
    check(NoRepeatNGram(size), lambda ids, row: reference(torch.tensor([ids]), row[None])[0], data)


@given(st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), min_size=1, max_size=12), st.data())
def test_bad_words(theirs: Any, words: list[list[int]], data: st.DataObject) -> None:
    reference = theirs.NoBadWordsLogitsProcessor(words)
    check(BadWords(words), lambda ids, row: reference(torch.tensor([ids]), row[None])[0], data)


@given(st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9, width=32), min_size=1, max_size=5), st.data())
def test_logit_bias(theirs: Any, bias: dict[int, float], data: st.DataObject) -> None:
    reference = theirs.SequenceBiasLogitsProcessor({(token,): by for token, by in bias.items()})
    check(LogitBias(bias), lambda ids, row: reference(torch.tensor([ids]), row[None])[0], data)


@given(st.integers(1, 12), st.lists(st.integers(0, V - 1), min_size=1, max_size=3), texts, texts, seeds)
def test_min_new_tokens(
    theirs: Any, count: int, ends: list[int], prompt: list[int], reply: list[int], seed: int
) -> None:
    reference = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), count, ends)
    ours = MinNewTokens(count, ends)
    for done in range(len(reply) + 1):
        for cut in range(done + 1):
            prefix = Prefix(prompt + reply[:cut], reply[cut:done], len(prompt))
            expected = reference(torch.tensor([prefix.tokens]), row_of(seed)[None])[0]
            assert torch.equal(ours(prefix, row_of(seed)), expected)


@given(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32), st.data())
def test_frequency_and_presence_penalty_by_openais_formula(a: float, b: float, data: st.DataObject) -> None:
    """Formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, with counts of only the reply."""
    prompt, reply, path = (data.draw(texts) for _ in range(3))
    row, processor = row_of(data.draw(seeds)), CountPenalty(a, b)
    assert torch.equal(processor(Prefix(prompt, [], len(prompt)), row.clone()), row)
    for text, drafted in ((prompt, path), (prompt + reply, path), (prompt + reply + path, [])):
        counts = Counter([*text[len(prompt) :], *drafted])
        expected = torch.tensor([float(row[j]) - counts[j] * a - (counts[j] > 0) * b for j in range(V)])
        torch.testing.assert_close(processor(Prefix(text, drafted, len(prompt)), row.clone()), expected)


@given(texts, st.lists(st.integers(0, 9)), st.integers(0, 40))
def test_the_tail_of_a_prefix(text: list[int], path: list[int], count: int) -> None:
    prefix = Prefix(text, path, 1)
    assert prefix.tail(count) == tuple(prefix.tokens[len(prefix) - min(count, len(prefix)) :])


def test_the_cost_of_a_row_does_not_grow_with_the_text() -> None:
    class Watched(list[int]):
        """A text that counts the tokens read from it."""

        read = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            self.read += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self) -> Any:
            raise AssertionError("the whole text was read")

    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.1, bad_words=[[1, 2, 3]], no_repeat_ngram_size=4)
    sampler = sampling.sampler(vocabulary=Vocabulary(V))
    text = Watched(i % V for i in range(3000))
    sampler.choose(Prefix(text), row_of(0))
    text.read = 0
    for _ in range(5):
        text.append(3)
        sampler.choose(Prefix(text, [1, 2]), row_of(0))
    assert text.read < 5 * 40


# Whole replies.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_golden_replies_are_transformers_own(dtype: torch.dtype) -> None:
    """If they differ, write them again: `python -m tests.support.golden_replies`."""
    pytest.importorskip("transformers")
    assert golden_replies.made(dtype) == golden_replies.replies()


DRAFTS: dict[str, tuple[float, DraftBudget] | None] = {
    "plain": None,
    "right chains": (1.0, DraftBudget.chain(6)),
    "right trees": (1.0, DraftBudget(12, 4, 3)),
    "chains": (0.7, DraftBudget.chain(6)),
    "trees": (0.7, DraftBudget(12, 4, 3)),
}


@cover(dtype=[torch.float32, torch.float64], knobs=KNOBS.keys(), prompt=range(len(PROMPTS)), draft=DRAFTS)
def test_whole_greedy_replies_are_transformers_own_with_any_draft(
    dtype: torch.dtype, knobs: str, prompt: int, draft: tuple[float, DraftBudget] | None
) -> None:
    tokens, expected = PROMPTS[prompt], golden_replies.replies()[knobs][prompt]
    sampling = Sampling(max_new_tokens=golden_replies.TOKENS, **KNOBS[knobs])
    accuracy, tree = draft or (0.0, DraftBudget.chain(0))
    drafter = Oracle(tokens + expected, accuracy, 61) if draft else None
    reply, _, stats = run(golden_replies.decoder(dtype), tokens, sampling, drafter, tree, eos=[7])
    assert reply == expected
    assert drafter is None or stats.accepted > len(reply) // 4


# Errors.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_named_in_the_error(temperature: float, toy: Decoder) -> None:
    """transformers would choose token 0, or fail on NaN."""
    sampling = Sampling(temperature=temperature, bad_words=[[token] for token in range(37)], seed=1)
    with pytest.raises(NoTokenLeft, match="every token is banned at position 3"):
        run(toy, [1, 2, 3], sampling)
    assert sampling.sampler().rank(Prefix([1, 2, 3]), torch.zeros(1, 37), [[]], 3)[0].tokens == [], (
        "and a drafter has nothing to say"
    )
    few = Sampling(temperature=temperature, bad_words=[[token] for token in range(35)], seed=1).sampler()
    assert sorted(few.rank(Prefix([1]), torch.zeros(1, 37), [[]], 3)[0].tokens) == [35, 36], (
        "and never drafts what is banned"
    )


def test_errors_of_processors_name_them() -> None:
    def short(prefix: Prefix, logits: Tensor) -> Tensor:
        return logits[:3]

    def wild(prefix: Prefix, logits: Tensor) -> Tensor:
        return logits * torch.nan

    with pytest.raises(InvalidOption, match="short"):
        Sampling(processors=[short]).sampler().choose(Prefix([1]), torch.zeros(9))
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogits, match="processor"):
            Sampling(processors=[wild], temperature=temperature).sampler().choose(Prefix([1]), torch.zeros(9))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"logit_bias": {61: 1.0}}, "logit_bias contains 61"),
        ({"bad_words": [[3, 99]]}, "bad_words contains 99"),
        ({"stop_token_ids": [70]}, "stop_token_ids contains 70"),
        ({"logprobs": 62}, "logprobs=62"),
        ({"bad_words": ["x"]}, "needs a tokenizer"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_before_any_work(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        Sampling(**wrong).sampler(vocabulary=Vocabulary(61))


def test_words_are_banned_with_and_without_a_space() -> None:
    def encode(text: str) -> list[int]:
        """Encode like SentencePiece: add a space before the text, and join each word with its space into one token."""
        pieces = {"\n": 1, " blue": 2, "blue": 3, " ": 4}
        text, ids = " " + text, []
        while text:
            piece = max((p for p in pieces if text.startswith(p)), key=len)
            ids.append(pieces[piece])
            text = text[len(piece) :]
        return ids

    assert spellings("blue", encode) == {(2,), (3,)}
    banned = Sampling(bad_words=["blue", [4]]).sampler(vocabulary=Vocabulary(9, encode=encode))
    assert banned.process(Prefix([1]), torch.zeros(9)).isinf().nonzero()[:, 0].tolist() == [2, 3, 4]


def test_end_tokens_wait_for_min_new_tokens_unless_eos_is_ignored() -> None:
    def banned(**options: Any) -> list[int]:
        sampler = Sampling(min_new_tokens=2, **options).sampler(vocabulary=Vocabulary(9, eos=(5,)))
        return sampler.process(Prefix([1], [0], 1), torch.zeros(9)).isinf().nonzero()[:, 0].tolist()

    assert banned() == [5]
    assert banned(stop_token_ids=[6]) == [5, 6]
    assert banned(ignore_eos=True) == []


def test_processors_come_in_the_documented_order_and_yours_last() -> None:
    def own(prefix: Prefix, logits: Tensor) -> Tensor:
        return logits

    sampler = Sampling(
        min_new_tokens=2,
        processors=[own],
        no_repeat_ngram_size=2,
        bad_words=[[1]],
        logit_bias={1: 1.0},
        presence_penalty=1.0,
        repetition_penalty=2.0,
    ).sampler(vocabulary=Vocabulary(9, eos=(5,)))
    kinds = [type(p) for p in sampler.processors[:-1]]
    assert kinds == [RepetitionPenalty, CountPenalty, LogitBias, BadWords, NoRepeatNGram, MinNewTokens]
    assert sampler.processors[-1] is own
    assert Sampling().sampler(vocabulary=Vocabulary(9, eos=(5,))).processors == ()


@given(st.integers(0, 10_000))
def test_sampling_after_penalties_follows_transformers_distribution(theirs: Any, seed: int) -> None:
    """Check the whole order at once: penalty, bans, temperature, top-k, top-p, min-p, typical-p."""
    text = [seed % 40, 3, 4, 3, 4, 3]
    row = row_of(seed, 40).double()
    warp = [
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
        theirs.NoRepeatNGramLogitsProcessor(2),
        theirs.NoBadWordsLogitsProcessor([[5], [3, 9]]),
        theirs.TemperatureLogitsWarper(0.8),
        theirs.TopKLogitsWarper(20),
        theirs.TopPLogitsWarper(0.95),
        theirs.MinPLogitsWarper(0.01),
        theirs.TypicalLogitsWarper(0.9),
    ]
    scores = row[None].clone()
    for processor in warp:
        scores = processor(torch.tensor([text]), scores)
    sampling = Sampling(
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words=[[5], [3, 9]],
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.9,
    )
    torch.testing.assert_close(sampling.sampler().distribution(Prefix(text, (), len(text)), row), scores[0].softmax(-1))


def test_a_drafter_in_another_width_keeps_its_counts() -> None:
    """A draft model's rows can be narrower than the target's rows, and both use the same counts."""
    sampler = Sampler(processors=(RepetitionPenalty(2.0),), noise=Noise(1))
    prefix = Prefix([8, 2, 8], [3], 3)
    narrow, wide = torch.ones(5), torch.ones(9)
    for _ in range(2):
        assert sampler.process(prefix, narrow).tolist() == [1, 1, 0.5, 0.5, 1]
        assert sampler.process(prefix, wide).tolist() == [1, 1, 0.5, 0.5, 1, 1, 1, 1, 0.5]
