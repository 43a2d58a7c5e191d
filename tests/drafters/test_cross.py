"""A draft model can have any tokenizer: the text stays the same, and correct drafts are accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.drafters.cross import MIN_SHARED_VOCABULARY, SharedTokenDrafter, TextDrafter, cross_vocabulary_drafter
from paceline.drafters.factory import make_drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.vocab_map import SAMPLE, VocabMap
from paceline.engine.engine import Engine
from paceline.errors import TokenizerMismatch
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import LogitsProcessor, Prefix
from paceline.testing import check_drafter, run, run_together
from paceline.text.tokenizer import Tokenizer
from paceline.types import Draft, DraftBudget, Verdict
from tests.conftest import packaged_model
from tests.support.cover import cover, some
from tests.support.original_tokenizers import ORIGINALS, original
from tests.support.plain import plain_text
from tests.support.toys import ask_for
from tests.support.vocabularies import KINDS, renumbered, speaker, tokenizer

WAYS: dict[str, Callable[[VocabMap], Drafter]] = {"shared tokens": SharedTokenDrafter, "text": TextDrafter}
SHAPES = {"chain": DraftBudget.chain(5), "tree": DraftBudget(12, 4, 3)}
RING = list(zip(KINDS, [*list(KINDS)[1:], *list(KINDS)[:1]], strict=True))
GREEDY = Sampling(max_new_tokens=24)
WARM = Sampling(max_new_tokens=24, temperature=0.9, seed=3)
DRAWN = Sampling(max_new_tokens=24, temperature=0.9, seed=3, rule="rejection")


@cache
def model(kind: str, seed: int = 0) -> Loaded:
    return speaker(tokenizer(kind), seed)


def only(tokens: Collection[int]) -> LogitsProcessor:
    """Return a processor that allows only these tokens."""

    def ban(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[list(tokens)] = logits[list(tokens)]
        return kept

    return ban


def prompt_of(target: Loaded) -> list[int]:
    return target.tokenizer.encode("The quick answer, she said")


@cover(
    lambda target, draft, **_: (target, draft) in RING or (draft, target) in RING,
    target=[*KINDS],
    draft=[*KINDS],
    way=[*WAYS],
    together=[("target",), ("draft",), ("way",)],
)
def test_any_tokenizer_drafts_for_any_other(target: str, draft: str, way: str) -> None:
    """Random models write broken characters and stray special tokens, which real models rarely do."""
    ours = model(target)
    drafter = WAYS[way](VocabMap(ours, model(draft, 1)))
    prompt = prompt_of(ours)
    assert run(ours.target, prompt, WARM, drafter, SHAPES["tree"])[0] == plain_text(ours.target, prompt, WARM)
    run(ours.target, prompt, DRAWN, drafter, SHAPES["tree"])


@cover(
    kind=["byte-level", "sentencepiece", "letters"],
    sampling={"greedy": GREEDY, "warm": WARM},
    shape=SHAPES,
    together=[("kind",), ("sampling", "shape")],
)
def test_a_model_that_drafts_for_itself_under_other_numbers_is_always_right(
    kind: str, sampling: Sampling, shape: DraftBudget
) -> None:
    ours = model(kind)
    words = VocabMap(ours, renumbered(tokenizer(kind)))
    # If several tokens have the same text, one of them is drafted.
    sampling = replace(sampling, processors=[only(words.shared)])
    assert len(words.shared) == len(set(words.target_bytes.values())) + len(ours.tokenizer.special_ids)
    prompt = prompt_of(ours)
    plain = run(ours.target, prompt, sampling)[0]
    _, _, alone = run(ours.target, prompt, sampling, DraftModel(ours.target, ours.target.vocab_size), shape)
    tokens, _, stats = run(ours.target, prompt, sampling, SharedTokenDrafter(words), shape)
    assert tokens == plain
    assert stats.accepted == alone.accepted
    assert stats.tokens_per_round >= (5 if shape.branch == 1 else 3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_text_drafted_by_the_model_itself_is_nearly_always_right(shape: DraftBudget) -> None:
    ours = model("letters")
    words = VocabMap(ours, renumbered(tokenizer("letters")))
    sampling = replace(GREEDY, processors=[only(words.target_bytes)])
    tokens, _, stats = run(ours.target, prompt_of(ours), sampling, TextDrafter(words), shape)
    assert tokens == run(ours.target, prompt_of(ours), sampling)[0]
    assert stats.tokens_per_round > (4.5 if shape.branch == 1 else 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_in_the_middle_of_a_text_equals_the_draft_after_a_new_start(way: str) -> None:
    """Later text has repeatedly changed the last tokens of the draft model, and therefore its cache."""
    ours = model("byte-level, small")
    words = VocabMap(ours, model("byte-level", 1))
    text = ours.tokenizer.encode(SAMPLE[:160])
    drafter = WAYS[way](words)
    drafter.admit(0, text[:3])
    for end in range(3, len(text) - 2, 2):
        ask = ask_for(0, SHAPES["chain"], WARM, text[:end])
        fresh = WAYS[way](words)
        fresh.admit(0, text[:end])
        assert drafter.propose([ask]) == fresh.propose([ask])
        drafter.observe(0, Verdict((), tuple(text[end : end + 2])), {})


def test_a_draft_completes_the_character_that_the_target_has_begun() -> None:
    words = VocabMap(model("byte-level, small"), model("letters", 1))
    (begun,) = words.speller.spell(b"\xc3")
    drafter = TextDrafter(words)
    ask = ask_for(0, SHAPES["chain"], GREEDY, [begun])
    letter = words.draft.tokenizer.vocabulary
    found = drafter._target_path(ask, [letter["é"], letter["l"]], b"\xc3")
    assert b"".join(words.target_bytes[token] for token in found) == b"\xa9l"
    assert drafter._target_path(ask, [letter["l"]], b"\xc3") == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_foreign_drafters_keep_the_contract(way: str) -> None:
    words = VocabMap(model("byte-level, small"), model("sentencepiece", 1))
    check_drafter(lambda: WAYS[way](words), words.target.target)


@some("way", [*WAYS], fast=["text"])
def test_drafts_are_the_same_in_company(way: str) -> None:
    ours = model("byte-level, small")
    words = VocabMap(ours, model("byte-level", 1))
    prompts = [prompt_of(ours), ours.tokenizer.encode("中"), ours.tokenizer.encode(SAMPLE[:90])]
    alone = [run(ours.target, p, WARM, WAYS[way](words), SHAPES["chain"]) for p in prompts]
    engine = Engine(ours.target, WAYS[way](words), SHAPES["chain"])
    together = run_together(engine, prompts, [WARM] * 3)
    assert [t[0] for t in together] == [t[0] for t in alone]
    assert [t[2].accepted for t in together] == [t[2].accepted for t in alone]


def test_a_token_that_the_draft_lacks_may_be_forced_into_its_draft() -> None:
    ours = model("byte-level")
    words = VocabMap(ours, model("byte-level, small", 1))
    forced = next(token for token in words.target_bytes if token not in words.shared)

    def force(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
        """The draft model gives the token probability 0 for any logits."""
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([forced]), 0.0)

    sampling = Sampling(max_new_tokens=8, processors=[force])
    tokens, _, stats = run(ours.target, prompt_of(ours), sampling, SharedTokenDrafter(words), SHAPES["chain"])
    assert tokens == [forced] * 8
    assert stats.accepted > 4


def test_q_is_a_distribution_over_shared_tokens() -> None:
    ours = model("byte-level")
    words = VocabMap(ours, model("byte-level, small", 1))
    drafter = SharedTokenDrafter(words)
    drafter.admit(0, prompt_of(ours))
    (draft,) = drafter.propose([ask_for(0, DraftBudget(8, 3, 2), DRAWN, prompt_of(ours))])
    assert draft.q.keys() == set(draft.parents)
    alien = [token for token in range(ours.target.vocab_size) if token not in words.shared]
    for q in draft.q.values():
        assert float(q.sum()) == pytest.approx(1)
        assert float(q[alien].sum()) == 0


def test_text_is_drafted_without_q() -> None:
    ours = model("byte-level")
    drafter = TextDrafter(VocabMap(ours, model("letters", 1)))
    drafter.admit(0, prompt_of(ours))
    (draft,) = drafter.propose([ask_for(0, DraftBudget(8, 3, 2), DRAWN, prompt_of(ours))])
    assert draft.tokens
    assert not draft.q


@cover(way=[*WAYS], padding={"draft": (0, 7), "target": (7, 0), "both": (3, 50)}, together=[("way",), ("padding",)])
def test_padded_vocabularies_are_supported(way: str, padding: tuple[int, int]) -> None:
    """Rows without a token can be drafted or written."""
    target, draft = padding
    ours = speaker(tokenizer("byte-level"), 0, target)
    words = VocabMap(ours, speaker(tokenizer("byte-level, small"), 1, draft))
    hot = Sampling(max_new_tokens=32, temperature=3.0, seed=1)
    tokens, _, _ = run(ours.target, [5, 6], hot, WAYS[way](words), SHAPES["tree"])
    assert tokens == run(ours.target, [5, 6], hot)[0]


def test_tokens_beyond_the_models_rows_are_not_drafted() -> None:
    """Gemma 3's tokenizer has one token more than its model."""
    words = tokenizer("byte-level")
    small = speaker(tokenizer("byte-level, small"))
    short = Loaded(small.target, words, (), {}, Path("x"))
    pair = VocabMap(short, model("byte-level", 1))
    assert max(pair.target_bytes) < short.target.vocab_size
    for make in WAYS.values():
        assert run(short.target, [5, 6], WARM, make(pair), SHAPES["tree"])[0] == run(short.target, [5, 6], WARM)[0]


def test_a_prompt_of_nothing_that_the_draft_can_read_gets_no_draft() -> None:
    ours = model("byte-level")
    prompt = [next(token for token, said in ours.tokenizer.token_bytes.items() if said == b"\xe4")]
    for make in WAYS.values():
        drafter = make(VocabMap(ours, model("letters", 1)))
        drafter.admit(0, prompt)
        assert drafter.propose([ask_for(0, SHAPES["chain"], GREEDY, prompt)]) == [Draft()]
        drafter.release(0)
        tokens, _, stats = run(ours.target, prompt, GREEDY, drafter, SHAPES["chain"])
        assert tokens == run(ours.target, prompt, GREEDY)[0]
        assert stats.drafted, "later there is something to go on from"


@some("way", [*WAYS], fast=["text"])
def test_a_draft_that_reaches_the_end_of_its_context_is_silent(way: str) -> None:
    ours = model("byte-level")
    drafter = WAYS[way](VocabMap(ours, model("letters", 1)))
    prompt = ours.tokenizer.encode(SAMPLE[:430])
    sampling = Sampling(max_new_tokens=120)
    assert run(ours.target, prompt, sampling, drafter, SHAPES["chain"])[0] == plain_text(ours.target, prompt, sampling)


def test_the_way_follows_from_the_share_of_tokens(caplog: pytest.LogCaptureFixture) -> None:
    ours = model("byte-level")
    for draft, kind in ((renumbered(tokenizer("byte-level")), SharedTokenDrafter), (model("letters"), TextDrafter)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made = make_drafter("model:x", ours, lambda reference, draft=draft: draft)
        assert type(made) is kind
        (record,) = caplog.records
        assert "model:x has another tokenizer than the target" in record.message
        assert ("tokenized again" in record.message) == (kind is TextDrafter)
        assert (VocabMap(ours, draft).shared_fraction() >= MIN_SHARED_VOCABULARY) == (kind is SharedTokenDrafter)
    assert type(make_drafter("model:x", ours, lambda reference: model("byte-level", 1))) is DraftModel


def test_a_tokenizer_without_words_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    mute = Loaded(model("letters").target, Tokenizer(Backend(WordLevel({}, ""))), (), {}, Path("x"))
    with pytest.raises(TokenizerMismatch, match="stands for text"):
        cross_vocabulary_drafter(model("letters"), mute, "model:x")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("target", "draft"), [("llama2", "qwen3"), ("gpt4o", "gemma3"), ("gemma3", "llama2"), ("deepseek_v3", "gpt2")]
)
def test_published_tokenizers_draft_for_each_other(target: str, draft: str, way: str) -> None:
    ours, theirs = (published(name, seed) for seed, name in enumerate((target, draft)))
    words = VocabMap(ours, theirs)
    assert words.shared_fraction() > 0.75
    llm = LLM(ours, WAYS[way](words), DraftBudget(6, 3, 2))
    for prompt in ("Naïve 中文 text, 1234 of it.\n\n", "<|im_start|>user\nHi<|im_end|>"):
        for how in (Sampling(max_new_tokens=12), Sampling(max_new_tokens=12, temperature=0.8, seed=1)):
            plain = LLM(ours).generate(prompt, how, raw=True)
            assert llm.generate(prompt, how, raw=True).token_ids == plain.token_ids


@cache
def published(name: str, seed: int) -> Loaded:
    return speaker(Tokenizer.from_folder(original(name, ORIGINALS[name][1])), seed)


@pytest.fixture(scope="module")
def demo() -> Iterator[Loaded]:
    with packaged_model("demo") as loaded:
        yield loaded


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_real_model_that_drafts_for_itself_as_a_stranger_is_nearly_always_right(way: str, demo: Loaded) -> None:
    words = VocabMap(demo, demo)
    llm = LLM(demo, WAYS[way](words), DraftBudget.chain(4))
    prompt = "Write three sentences about the sea."
    how = Sampling(max_new_tokens=40)
    drafted = llm.generate(prompt, how)
    assert drafted.token_ids == LLM(demo).generate(prompt, how).token_ids
    assert drafted.stats.tokens_per_round > 4
