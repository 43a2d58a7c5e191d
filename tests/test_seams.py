"""Every drafter and target keeps its contract, and the contract's check notices violations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.block import Block
from paceline.drafters.cached import SavedStates
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.protocols import Target
from paceline.sampling.parameters import Sampling
from paceline.testing import (
    TINY,
    ListCache,
    ToyTarget,
    check_drafter,
    check_target,
    drafters,
    random_tensors,
    run,
)
from paceline.types import Draft, DraftBudget, Tap, Verdict
from tests.support.cover import some
from tests.support.tiny_heads import TINY_BLOCK, TINY_MEDUSA, block_tensors, eagle_config, eagle_tensors, medusa_tensors
from tests.support.toys import toy_foreigner, toy_model, toy_target

OTHER = toy_target(seed=9)
SHARED = replace(TINY_MEDUSA, shared=True, layers=2)
FOREIGN = VocabMap(toy_model(), toy_foreigner(seed=9))


def eagle(**changes: object) -> Eagle:
    config = eagle_config(**changes)
    return Eagle(config, eagle_tensors(config), toy_target())


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "suffix that remembers": lambda: Suffix(remember=True),
    "model": lambda: DraftModel(OTHER, 37),
    "eagle-3": lambda: eagle(fc_norm=True),
    "eagle-1": lambda: eagle(version=1),
    "model with its own tokenizer": lambda: SharedTokenDrafter(FOREIGN),
    "model's text": lambda: TextDrafter(FOREIGN),
    "stack": lambda: DrafterStack([Suffix(), NGram(), DraftModel(OTHER, 37)]),
    "block": lambda: Block(TINY_BLOCK, block_tensors(), toy_target()),
    "medusa": lambda: Medusa(TINY_MEDUSA, medusa_tensors(), toy_target()),
    "medusa without heads of its own": lambda: Medusa(SHARED, medusa_tensors(SHARED), toy_target()),
    "early exit": lambda: EarlyExit(ExitConfig(32, 1), {}, OTHER, threshold=0.1),
    "early exit in a stack": lambda: DrafterStack([NGram(), EarlyExit(ExitConfig(32, 1), {}, OTHER, threshold=0.0)]),
}


@some("drafter", [*DRAFTERS], fast=["early exit in a stack"])
def test_drafters_keep_the_contract(drafter: str) -> None:
    check_drafter(DRAFTERS[drafter], OTHER)


class Endless(NGram):
    """Ignores its budget."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft.chain([1] * 9) for _ in asks]


class Forgetful(NGram):
    """Drafts something else for a repeated request."""

    calls = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += 1
        return [Draft.chain([self.calls % 37][: ask.budget.nodes]) for ask in asks]


class Short(NGram):
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return []


class Uniform(NGram):
    """Drafts the first request's draft for all requests of a batch."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft.chain([1] * asks[0].budget.depth) for _ in asks]


class Amnesiac(Eagle):
    """Saves its state, but does not load it."""

    def load(self, slot: int, saved: SavedStates, length: int) -> None: ...


SHALLOW = toy_target(layers=1)


def amnesiac() -> Amnesiac:
    config = eagle_config(SHALLOW.config)
    return Amnesiac(config, eagle_tensors(config), SHALLOW)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        pytest.param(amnesiac, "loaded tokens and a fully fed prompt get different drafts", marks=pytest.mark.slow),
        (Endless, "nodes"),
        pytest.param(Forgetful, "changes a draft", marks=pytest.mark.slow),
        (Short, "one draft per ask"),
        (Uniform, "deeper than"),
    ],
)
def test_the_check_notices_drafters_that_do_not(broken: Callable[[], Drafter], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_drafter(broken, SHALLOW)


@pytest.mark.parametrize(
    ("broken", "clause", "said"),
    [
        (Forgetful, drafters._check_requests, "changes a draft"),
        (Uniform, drafters._check_batch, "deeper than"),
    ],
)
def test_a_clause_notices_drafters_that_break_it(
    broken: Callable[[], Drafter], clause: Callable[[Drafter, Target, Sequence[int]], None], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        clause(broken(), SHALLOW, [1, 5, 9, 5, 9, 5])


def test_a_drafter_hears_the_whole_text_and_its_hidden_states() -> None:
    class Listener(Drafter):
        taps: tuple[Tap, ...] = (1, "final")
        draft = DraftBudget.chain(2)

        def __init__(self) -> None:
            self.seen: list[int] = []
            self.states: list[torch.Tensor] = []
            self.log: list[str] = []

        def admit(self, slot: int, prompt: Sequence[int]) -> None:
            self.log.append("admit")
            self.text = list(prompt)

        def feed(self, slot, tokens, taps) -> None:  # type: ignore[no-untyped-def]
            self.log.append("feed")
            self.seen += tokens
            self.states.append(taps["final"])
            assert taps[1].shape == taps["final"].shape == (len(tokens), 32)

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            assert [(a.last, a.position) for a in asks] == [(self.text[-1], len(self.text) - 1)]
            return [Draft.chain([3, 4][: a.budget.nodes]) for a in asks]

        def observe(self, slot: int, verdict: Verdict, out) -> None:  # type: ignore[no-untyped-def]
            kept = [0, *verdict.path]
            self.seen += [self.text[-1], *verdict.tokens[:-1]]
            self.states.append(out["final"][kept])
            self.text += verdict.tokens

        def release(self, slot: int) -> None:
            self.log.append("release")

    target, drafter = toy_target(context_length=2048), Listener()
    prompt = [i % 37 for i in range(300)]
    tokens, _, _ = run(target, prompt, Sampling(max_new_tokens=20), engine=Engine(target, drafter))
    assert drafter.log == ["admit", "feed", "feed", "release"]
    assert drafter.seen == (prompt + tokens)[: len(drafter.seen)]
    assert len(drafter.seen) >= len(prompt) + len(tokens) - 4
    again = Listener()
    run(target, drafter.seen, Sampling(max_new_tokens=1), engine=Engine(target, again))
    states = torch.cat(again.states)
    torch.testing.assert_close(torch.cat(drafter.states)[: len(states)], states, rtol=0, atol=1e-9)


class Windowed(Decoder):
    """A model in which one layer sees five positions, and the other all positions."""

    def new_cache(self) -> SlabCache:
        layers = [LayerAttention(8**-0.5, window=5), LayerAttention(8**-0.5)]
        return SlabCache(layers, 2, 8, 48, self.dtype, self.device)


def windowed() -> Decoder:
    config = replace(TINY, context_length=48)
    return Windowed(config, random_tensors(config), torch.float64, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [windowed, ToyTarget])
def test_targets_keep_the_contract(make: Callable[[], Target]) -> None:
    check_target(make, tolerance=1e-9, taps=(0, "final"))


def test_a_decoder_writes_the_same_over_the_list_cache() -> None:
    class Plain(Decoder):
        def new_cache(self) -> ListCache:
            return ListCache()

    plain = Plain(TINY, random_tensors(TINY), torch.float64, torch.device("cpu"))
    prompt = [1, 5, 9, 5, 9, 5, 2]
    sampling = Sampling(max_new_tokens=20, temperature=0.8, seed=2)
    alone = run(toy_target(), prompt, sampling)[0]
    for drafter in (Suffix(), EarlyExit(ExitConfig(32, 1), {}, plain, threshold=0.0)):
        assert run(plain, prompt, sampling, drafter, DraftBudget(8, 4, 2))[0] == alone
