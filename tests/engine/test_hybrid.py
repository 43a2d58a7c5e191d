"""Hybrids: the same text with every drafter, with cached prefixes, after rollbacks, and bit for bit in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.cache.state import CHECKPOINT_INTERVAL
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.kernels.linear import packs_bfloat16
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.sampling.parameters import Sampling
from paceline.session import Session
from paceline.testing import run, run_together
from paceline.types import Draft, DraftBudget
from tests.support.broken_states import Twice, broken
from tests.support.cover import cover, some
from tests.support.hybrids import HYBRID, text, tiny_hybrid, tiny_mamba
from tests.support.plain import plain_text
from tests.support.tiny_heads import (
    TINY_BLOCK,
    TINY_MEDUSA,
    block_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    mtp_head,
)

TARGET, OTHER = tiny_hybrid(), tiny_hybrid(seed=9)
MAMBA = tiny_mamba()
CHAIN, TREE = DraftBudget.chain(4), DraftBudget(8, 4, 3)
SHAPES = {"chain": CHAIN, "tree": TREE}

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "a hybrid": lambda: DraftModel(OTHER, 37),
    "itself": lambda: DraftModel(TARGET, 37),
    "eagle-3": lambda: Eagle(eagle_config(), eagle_tensors(eagle_config()), TARGET),
    "mtp": lambda: Eagle(*mtp_head(HYBRID), TARGET),
    "medusa": lambda: Medusa(TINY_MEDUSA, medusa_tensors(), TARGET),
    "block": lambda: Block(TINY_BLOCK, block_tensors(), TARGET),
    "early exit": lambda: EarlyExit(ExitConfig(32, 2), {}, TARGET, threshold=0.0),
    "stack": lambda: DrafterStack([NGram(), DraftModel(TARGET, 37)]),
}
GREEDY, SAMPLED = Sampling(max_new_tokens=15, temperature=0.0), Sampling(max_new_tokens=15, temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [run(TARGET, text(CHECKPOINT_INTERVAL - 10), sampling)[0] for sampling in (GREEDY, SAMPLED)]


@cover(shape=SHAPES, name=[*DRAFTERS], together=[("name",), ("shape",)])
def test_the_text_does_not_depend_on_the_drafter(name: str, shape: DraftBudget, plain: list[list[int]]) -> None:
    """The text crosses a checkpoint, with greedy and sampled requests in one batch."""
    engine = Engine(TARGET, DRAFTERS[name](), shape)
    replies = run_together(engine, [text(CHECKPOINT_INTERVAL - 10)] * 2, [GREEDY, SAMPLED])
    assert [reply[0] for reply in replies] == plain
    if name == "itself":
        assert all(stats.acceptance == 1.0 for _, _, stats in replies if shape is CHAIN), "its own states follow too"


@cover(shape=SHAPES, name=["itself", "a mamba", "a hybrid", "ngram"], together=[("shape",)])
def test_mamba_keeps_its_text_too(shape: DraftBudget, name: str) -> None:
    made: dict[str, Drafter] = {
        "itself": DraftModel(MAMBA, 37),
        "a mamba": DraftModel(tiny_mamba(seed=9), 37),
        "a hybrid": DraftModel(TARGET, 37),
        "ngram": NGram(),
    }
    samplings = [GREEDY, SAMPLED]
    plain = [plain_text(MAMBA, text(CHECKPOINT_INTERVAL - 10), sampling) for sampling in samplings]
    replies = run_together(Engine(MAMBA, made[name], shape), [text(CHECKPOINT_INTERVAL - 10)] * 2, samplings)
    assert [reply[0] for reply in replies] == plain


@some("shape", SHAPES, fast=["tree"])
def test_applying_a_mamba_update_twice_changes_the_text(shape: DraftBudget) -> None:
    engine = Engine(broken(Twice, hybrid=tiny_mamba), NGram(), shape)
    for sampling in (GREEDY, SAMPLED):
        prompt = text(CHECKPOINT_INTERVAL - 10)
        assert run(engine.target, prompt, sampling, engine=engine)[0] != plain_text(MAMBA, prompt, sampling)


def test_a_state_that_is_applied_twice_is_another_text(plain: list[list[int]]) -> None:
    replies = run_together(
        Engine(broken(Twice), NGram(), CHAIN), [text(CHECKPOINT_INTERVAL - 10)] * 2, [GREEDY, SAMPLED]
    )
    assert [reply[0] for reply in replies] != plain


def test_prompts_begin_at_the_checkpoints_of_earlier_texts() -> None:
    engine = Engine(TARGET, NGram(), CHAIN)
    engine.remember(1 << 26)
    first, short = text(700), Sampling(max_new_tokens=4, temperature=0.7, seed=1)
    run(TARGET, first, short, engine=engine)
    for prompt, cached in ((text(700)[:640] + text(60, 2), 512), (text(700)[:300] + text(60, 3), 256), (text(90), 0)):
        reply, _, stats = run(TARGET, prompt, short, engine=engine)
        assert stats.cached == cached
        assert reply == run(TARGET, prompt, short)[0]


def test_sessions_roll_back_to_any_token() -> None:
    session = Session(TARGET, (), lambda *a, **b: [], lambda ids: "")
    tokens = text(CHECKPOINT_INTERVAL + 60)
    session.observe(tokens)
    session.logits_after([1, 2, 3])
    session.observe([1, 2, 9])
    for length in (CHECKPOINT_INTERVAL + 61, CHECKPOINT_INTERVAL + 20, CHECKPOINT_INTERVAL - 5, 3):
        session.rollback_to(length)
        session.observe([5])
        again = Session(TARGET, (), lambda *a, **b: [], lambda ids: "")
        again.observe([*(*tokens, 1, 2, 9)[:length], 5])
        tree = Draft((4, 5, 6), (0, 0, 1))
        torch.testing.assert_close(session.tree_logits(tree), again.tree_logits(tree))


@pytest.mark.skipif(not packs_bfloat16(), reason="no bfloat16 products that keep bits")
@cover(hybrid={"hybrid": tiny_hybrid, "mamba": tiny_mamba}, shape=SHAPES, together=[("hybrid",), ("shape",)])
def test_bfloat16_keeps_bits(hybrid: Callable[..., Decoder], shape: DraftBudget) -> None:
    target = hybrid(dtype=torch.bfloat16)
    assert guarantee(target) == "bits"
    prompt, sampling = text(70), Sampling(max_new_tokens=30, temperature=0.8, seed=5)
    plain = run(target, prompt, sampling)[0]
    assert run(target, prompt, sampling, DraftModel(hybrid(9, torch.bfloat16), 37), shape)[0] == plain


def test_the_self_check_notices_states_that_do_not_roll_back() -> None:
    if packs_bfloat16():
        target = broken(Twice, torch.bfloat16)
        assert guarantee(target) == "rounding"
