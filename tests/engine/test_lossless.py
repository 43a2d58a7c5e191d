"""Losslessness is one property: `with speculation == without`, token for token. Negative controls prove the tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.slab import SlabCache
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.engine.detokenizer import Logprobs, TextStream
from paceline.engine.engine import Engine
from paceline.engine.stats import Stats
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.sampling.noise import Noise
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Sampler
from paceline.testing import TINY, Oracle, random_tensors, run, tiny_target
from paceline.types import DraftBudget, Rows, Want
from paceline.verify.tree import pack_prefix
from tests.support.cover import cover
from tests.support.plain import plain_reply, plain_text
from tests.support.tiny_heads import (
    TINY_BLOCK,
    TINY_MEDUSA,
    block_tensors,
    eagle_config,
    eagle_tensors,
    fitted_medusa,
    medusa_tensors,
)
from tests.support.toys import toy_foreigner, toy_model, toy_target
from tests.support.trees import drafts

TOY, EXACT = toy_target(), tiny_target()

OTHER = toy_target(seed=9, layers=1)
EVEN = torch.arange(0, 37, 2)
SMALLEST = replace(TINY, layers=1)
TRIMMED = Decoder(SMALLEST, random_tensors(SMALLEST, 9), torch.float64, torch.device("cpu"), head_tokens=EVEN)
EAGLE, EAGLE_1 = eagle_config(), eagle_config(version=1)
FOREIGN = VocabMap(toy_model(), toy_foreigner(seed=9))
EXIT = ExitConfig(hidden=32, layers=1)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]

Make = Callable[[list[int]], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda text: NGram(),
    "suffix": lambda text: Suffix(),
    "suffix that remembers": lambda text: Suffix(remember=True),
    "the model itself": lambda text: DraftModel(TOY, 37),
    "another model": lambda text: DraftModel(OTHER, 37),
    "another model with a trimmed head": lambda text: DraftModel(TRIMMED, 37, EVEN),
    "block": lambda text: Block(TINY_BLOCK, block_tensors(), TOY),
    "eagle-3": lambda text: Eagle(EAGLE, eagle_tensors(EAGLE), TOY),
    "eagle-1": lambda text: Eagle(EAGLE_1, eagle_tensors(EAGLE_1), TOY),
    "eagle-1 with a trimmed head": lambda text: Eagle(replace(EAGLE_1, head_tokens=EVEN), eagle_tensors(EAGLE_1), TOY),
    "another model with its own tokenizer": lambda text: SharedTokenDrafter(FOREIGN),
    "another model's text": lambda text: TextDrafter(FOREIGN),
    "stack": lambda text: DrafterStack([NGram(), DraftModel(OTHER, 37)]),
    "cascade": lambda text: DrafterStack([Suffix(), NGram(), DraftModel(TOY, 37)]),
    "medusa": lambda text: Medusa(TINY_MEDUSA, medusa_tensors(), TOY),
    "medusa that knows the beginning": lambda text: Medusa(TINY_MEDUSA, fitted_medusa(TOY, [text[:32]]), TOY),
    "early exit": lambda text: EarlyExit(EXIT, {}, TOY, threshold=0.0),
    "early exit, where it is sure": lambda text: DrafterStack([NGram(), EarlyExit(EXIT, {}, TOY, threshold=0.2)]),
    "oracle at 70 %": lambda text: Oracle(text, 0.7, 37),
    "always right": lambda text: Oracle(text, 1.0, 37),
    "hostile": lambda text: Oracle(text, 0.0, 37),
}
SHAPES = {"chain": DraftBudget.chain(5), "long chain": DraftBudget.chain(11), "tree": DraftBudget(14, 4, 3)}


def no_echo(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    """A user-defined processor that depends on the whole prefix. Its sum selects a third of the tokens to penalise."""
    logits[(sum(prefix.tokens) + len(prefix.reply)) % 3 :: 3] -= 2.0
    return logits


SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=36),
    "warm": Sampling(max_new_tokens=36, temperature=0.7, seed=1),
    "top-k": Sampling(max_new_tokens=36, temperature=1.3, top_k=5, seed=2),
    "top-p": Sampling(max_new_tokens=36, temperature=1.0, top_p=0.8, seed=3),
    "min-p": Sampling(max_new_tokens=36, temperature=1.0, min_p=0.1, seed=4),
    "hot": Sampling(max_new_tokens=36, temperature=3.0, seed=5),
    "penalties": Sampling(max_new_tokens=32, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    "bans": Sampling(
        max_new_tokens=32,
        temperature=1.0,
        seed=7,
        no_repeat_ngram_size=2,
        bad_words=[[3], [5, 9], [9, 5, 2]],
        logit_bias={7: 2.0, 8: -2.0},
    ),
    "all at once": Sampling(
        max_new_tokens=32,
        temperature=0.9,
        seed=8,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bad_words=[[4, 4]],
        no_repeat_ngram_size=4,
        processors=[no_echo],
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.95,
        logprobs=3,
    ),
}


@cover(drafter=[*DRAFTERS], shape=SHAPES, sampling=SAMPLINGS, together=[("drafter",), ("shape", "sampling")])
def test_the_text_is_the_targets_own(drafter: str, shape: DraftBudget, sampling: Sampling) -> None:
    plain, finish = plain_reply(TOY, PROMPT, sampling)
    tokens, ended, stats = run(TOY, PROMPT, sampling, DRAFTERS[drafter](PROMPT + plain), shape)
    assert tokens == plain
    assert ended == finish
    assert stats.tokens == len(plain)
    missing = stats.rounds + stats.accepted - stats.tokens
    assert 0 <= missing <= 1, "only the last round may lack the target's own token"
    assert sum(stats.accepted_at) == stats.accepted <= stats.drafted


VARIED = Sampling(max_new_tokens=24, temperature=1.0, seed=8)
STOPS: dict[str, Callable[[list[int], int], tuple[dict[str, Any], list[int]]]] = {
    "stop token": lambda text, at: ({"stop_token_ids": [text[at]]}, []),
    "stop string": lambda text, at: ({"stop": chr(text[at])}, []),
    "longer stop string": lambda text, at: ({"stop": "".join(map(chr, text[at : at + 3]))}, []),
    "length": lambda text, at: ({"max_new_tokens": at + 1}, []),
    "eos": lambda text, at: ({}, [text[at]]),
}
"""(text, position) -> parameters and end-of-sequence tokens that stop the text at this position."""


@cover(
    drafter=[*DRAFTERS],
    shape=SHAPES,
    stop=STOPS,
    at=range(0, 24, 3),
    together=[("drafter",), ("shape", "stop"), ("at",)],
)
def test_every_stop_condition_ends_at_the_same_token(
    drafter: str, shape: DraftBudget, stop: Callable[[list[int], int], tuple[dict[str, Any], list[int]]], at: int
) -> None:
    text = plain_text(TOY, PROMPT, VARIED)
    changes, eos = stop(text, at)
    sampling = replace(VARIED, **changes)
    plain = plain_reply(TOY, PROMPT, sampling, eos)
    assert run(TOY, PROMPT, sampling, DRAFTERS[drafter](PROMPT + text), shape, eos=eos)[:2] == plain
    assert plain[1] == ("length" if "max_new_tokens" in changes else "eos" if eos else "stop")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_criteria_of_the_users_end_the_reply_inside_an_accepted_block(shape: DraftBudget) -> None:
    text = plain_text(TOY, PROMPT, VARIED)
    for at in range(24):
        asked: list[list[int]] = []

        def enough(ids: Sequence[int], text: str, at: int = at, asked: list[list[int]] = asked) -> bool:
            asked.append(list(ids))
            return len(ids) > at

        sampling = replace(VARIED, stop_when=enough)
        tokens, finish, stats = run(TOY, PROMPT, sampling, Oracle(PROMPT + text, 1.0, 37), shape)
        assert (tokens, finish) == (text[: at + 1], "stop")
        assert asked == [text[:n] for n in range(1, at + 2)], "every token once, in order, and none beyond"
        assert at < 6 or stats.accepted > at // 2


def test_drafts_reach_the_end_of_the_context() -> None:
    short = toy_target(context_length=40)
    plain, finish, _ = run(short, PROMPT, Sampling(max_new_tokens=500))
    assert finish == "length"
    assert len(plain) == 30
    for shape in SHAPES.values():
        for drafter in (Oracle(PROMPT + plain, 0.8, 37), DraftModel(toy_target(layers=1), 37), Suffix()):
            assert run(short, PROMPT, Sampling(max_new_tokens=500), drafter, shape)[0] == plain


@given(st.lists(st.integers(0, 36), min_size=1, max_size=30), st.integers(0, 99), st.data())
def test_any_tree_at_any_moment(prompt: list[int], seed: int, data: st.DataObject) -> None:
    """Draft arbitrary trees, with some right paths, in arbitrary rounds. Use torch's products without kernels."""
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
    plain = run(EXACT, prompt, sampling)[0]

    class Anything(Oracle):
        def propose(self, asks):  # type: ignore[no-untyped-def]
            draft = data.draw(drafts(most=asks[0].budget.nodes, vocab=37))
            true = [*self._text, 0][min(asks[0].position + 1, len(self._text))]
            if draft.tokens and data.draw(st.booleans()) and true not in draft.tokens:
                draft = type(draft)((true, *draft.tokens[1:]), draft.parents)
            return [draft for _ in asks]

    assert run(EXACT, prompt, sampling, Anything(prompt + plain, 1.0, 37), DraftBudget(8, 8, 3))[0] == plain


@cover(
    temperature=[0.0, 0.8],
    length=range(1, 6),
    prompt={"long prompt": PROMPT, "1 token": PROMPT[:1], "2 tokens": PROMPT[:2], "3 tokens": PROMPT[:3]},
    together=[("temperature", "prompt"), ("length",)],
)
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float, length: int, prompt: list[int]) -> None:
    """Any error in the draft's cache or positions (an off-by-one, a stale row) would cause a rejection."""
    sampling = Sampling(max_new_tokens=60, temperature=temperature, seed=4)
    _, _, stats = run(TOY, prompt, sampling, DraftModel(TOY, 37), DraftBudget.chain(length))
    assert stats.tokens_per_round == 1 + length, "a row of padding was taken for the last token"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_of_a_model_that_drafts_for_itself_is_mostly_right(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=60, temperature=temperature, seed=4)
    _, _, tree = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), DraftBudget(12, 4, 3))
    assert tree.tokens_per_round > 3


# Negative controls: each breaks one thing on purpose, and the property above must notice.


def test_a_commit_that_forgets_to_move_a_trees_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_text(TOY, PROMPT, SAMPLINGS["warm"])
    oracle = lambda: Oracle(PROMPT + plain, 0.9, 37)  # noqa: E731
    assert run(TOY, PROMPT, SAMPLINGS["warm"], oracle(), SHAPES["tree"])[0] == plain
    honest = SlabCache.commit

    def in_order(self: SlabCache, rows: Rows, paths: Sequence[Sequence[int]]) -> None:
        honest(self, rows, [range(1, len(path) + 1) for path in paths])

    monkeypatch.setattr(SlabCache, "commit", in_order)
    assert run(TOY, PROMPT, SAMPLINGS["warm"], oracle(), SHAPES["tree"])[0] != plain


def test_an_off_by_one_in_the_drafts_cache_is_noticed() -> None:
    class Late(DraftModel):
        """Is one token behind from the first round."""

        def observe(self, slot, verdict, out):  # type: ignore[no-untyped-def]
            text = self._slots[slot].token_ids
            super().observe(slot, verdict, out)
            if len(text) == len(PROMPT) + len(verdict.tokens):
                del text[-1]

    sampling = SAMPLINGS["greedy"]
    plain, _, right = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), DraftBudget.chain(5))
    tokens, _, wrong = run(TOY, PROMPT, sampling, Late(TOY, 37), DraftBudget.chain(5))
    assert tokens == plain, "a bad drafter costs speed, never text"
    assert wrong.rounds > 2 * right.rounds


def test_noise_of_the_wrong_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting with different noise than the target lowers acceptance, so the noise is really shared."""
    sampling = SAMPLINGS["hot"]
    right = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), DraftBudget.chain(5))[2]
    rank = Sampler.rank
    monkeypatch.setattr(
        Sampler, "rank", lambda self, at, rows, paths, *more: rank(self, at, rows, [[*p, 0] for p in paths], *more)
    )
    wrong = run(TOY, PROMPT, sampling, DraftModel(TOY, 37), DraftBudget.chain(5))[2]
    assert wrong.accepted < right.accepted / 2


def test_noise_that_moves_with_the_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """New noise for each draw, as in ordinary samplers, makes the text depend on the draft."""
    plain = plain_text(TOY, PROMPT, SAMPLINGS["warm"])
    honest, draws = Noise.best, itertools.count()
    monkeypatch.setattr(Noise, "best", lambda self, position, *row: honest(self, next(draws) // 2, *row))
    assert run(TOY, PROMPT, SAMPLINGS["warm"], Oracle(PROMPT + plain, 0.7, 37), SHAPES["chain"])[0] != plain


def test_a_processor_that_does_not_see_the_drafted_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor counts penalties at the start of a round instead of at each row, as other batched engines did."""
    honest = Sampler.process
    for name in ("penalties", "bans", "all at once"):
        plain = plain_text(TOY, PROMPT, SAMPLINGS[name])
        with monkeypatch.context() as broken:
            broken.setattr(Sampler, "process", lambda self, prefix, row: honest(self, prefix.after(()), row))
            assert run(TOY, PROMPT, SAMPLINGS[name], Oracle(PROMPT + plain, 1.0, 37), SHAPES["chain"])[0] != plain


@cover(name=["greedy", "warm", "all at once"], shape=SHAPES, together=[("name",), ("shape",)])
def test_logprobs_are_the_same_with_and_without_speculation(name: str, shape: DraftBudget) -> None:
    sampling = replace(SAMPLINGS[name], logprobs=3)
    plain = reported(sampling, None, shape)
    text = [token for token, _ in plain]
    drafted = reported(sampling, Oracle(PROMPT + text, 0.8, 37), shape)
    assert [token for token, _ in drafted] == text
    for (_, ours), (_, alone) in zip(drafted, plain, strict=True):
        assert ours.chosen == pytest.approx(alone.chosen, abs=1e-9)
        assert [i for i, _ in ours.top] == [i for i, _ in alone.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in alone.top], abs=1e-9)
    # Both equal the model's own log-probabilities for this text, before sampling parameters apply.
    cache = TOY.new_cache()
    fed = TOY.forward(pack_prefix(PROMPT + text, cache.acquire(), 0, TOY.device), cache, Want()).logits[0]
    rows = fed[len(PROMPT) - 1 : len(PROMPT) + len(text) - 1].log_softmax(-1)
    assert [p.chosen for _, p in plain] == pytest.approx([float(row[t]) for row, t in zip(rows, text, strict=True)])


def reported(sampling: Sampling, drafter: Drafter | None, shape: DraftBudget) -> list[tuple[int, Logprobs]]:
    engine = Engine(TOY, drafter, shape)
    text = TextStream(sampling, (), lambda ids: "", 200)
    request = engine.start(PROMPT, sampling.sampler(), text, Stats(0, "rounding"))
    engine.prefill(request)
    chunks = []
    while not request.finish:
        chunks += engine.step([request])[0]
    engine.finish(request)
    assert drafter is None or request.stats.accepted > 10
    return [(chunk.token_id, chunk.logprobs) for chunk in chunks if chunk.logprobs]


# Several requests in one pass.


BATCHED: dict[str, Callable[[Decoder], Drafter]] = {
    "model": lambda toy: DrafterStack([Suffix(), Eagle(EAGLE, eagle_tensors(EAGLE), toy), DraftModel(OTHER, 37)]),
    "early exit": lambda toy: EarlyExit(EXIT, {}, toy, threshold=0.2),
    "early exit where lookup is silent": lambda toy: DrafterStack([NGram(), EarlyExit(EXIT, {}, toy, threshold=0.1)]),
}


@cover(
    sampling=["greedy", "warm", "all at once"],
    drafter=[*BATCHED],
    shape=SHAPES,
    together=[("sampling",), ("drafter",), ("shape",)],
)
def test_a_ragged_batch_writes_the_same_as_single_requests(
    sampling: str, drafter: str, shape: DraftBudget, toy: Decoder
) -> None:
    how = SAMPLINGS[sampling]
    prompts = [PROMPT, [3], [7, 7, 7, 7, 8], list(range(30))]
    alone = [plain_text(toy, prompt, how) for prompt in prompts]
    engine = Engine(toy, BATCHED[drafter](toy), shape)
    requests = []
    for prompt in prompts:
        text = TextStream(how, (), lambda ids: "", 200)
        requests.append(engine.start(prompt, how.sampler(), text, Stats(0, "rounding")))
        engine.prefill(requests[-1])
    live = list(requests)
    while live:
        engine.step(live)
        for request in [r for r in live if r.finish]:
            engine.finish(request)
        live = [r for r in live if not r.finish]
    assert [r.token_ids[len(p) :] for r, p in zip(requests, prompts, strict=True)] == alone
