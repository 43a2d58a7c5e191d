"""GLM-4.5, DeepSeek V3 and Llama 4 (across chunk boundaries): the same text with drafters, batches and rollbacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.kernels.cpu.build import library
from paceline.sampling.parameters import Sampling
from paceline.session import Session
from paceline.testing import run, run_together
from paceline.types import Draft, DraftBudget
from tests.support.cover import cover
from tests.support.golden import decoder
from tests.support.logits import text
from tests.support.mixtures import CHAIN, PROMPTS, SAMPLINGS, TREE, plain

CASES = {"glm4.5": "glm4.5 without groups", "llama4, sliding": "llama4", "deepseek v3": "deepseek v2"}
"""Target -> a model that drafts for it."""


@cover(
    case=[*CASES],
    shape={"chain": CHAIN, "tree": TREE},
    drafter=["ngram", "another", "itself"],
    together=[("case",), ("shape",), ("drafter",)],
)
def test_the_text_does_not_depend_on_the_drafter(case: str, shape: DraftBudget, drafter: str) -> None:
    target = decoder(case)
    made: dict[str, Callable[[], Drafter]] = {
        "ngram": NGram,
        "another": lambda: DraftModel(decoder(CASES[case]), 101),
        "itself": lambda: DraftModel(target, 101),
    }
    replies = run_together(Engine(target, made[drafter](), shape), PROMPTS, SAMPLINGS)
    assert [reply[0] for reply in replies] == plain(target)
    assert sum(stats.drafted for _, _, stats in replies) > 0
    if drafter == "itself" and shape is CHAIN:
        assert all(stats.acceptance == 1.0 for _, _, stats in replies)


@pytest.mark.parametrize("case", CASES)
def test_prompts_begin_where_earlier_texts_were_the_same(case: str) -> None:
    target = decoder(case)
    engine = Engine(target, NGram(), CHAIN)
    engine.remember(1 << 26)
    short = Sampling(max_new_tokens=8, temperature=0.7, seed=1)
    run(target, text(400), short, engine=engine)
    prompt = text(400)[:300] + PROMPTS[1]
    reply, _, stats = run(target, prompt, short, engine=engine)
    assert stats.cached >= 256
    assert reply == run(target, prompt, short)[0]


@pytest.mark.parametrize("case", CASES)
def test_sessions_roll_back_to_any_token(case: str) -> None:
    target, tokens = decoder(case), text(60)
    session = Session(target, (), lambda *a, **b: [], lambda ids: "")
    session.observe(tokens)
    session.logits_after([1, 2, 3])
    session.observe([1, 2, 9])
    for length in (61, 41, 20, 3):
        session.rollback_to(length)
        session.observe([5])
        again = Session(target, (), lambda *a, **b: [], lambda ids: "")
        again.observe([*(*tokens, 1, 2, 9)[:length], 5])
        tree = Draft((4, 5, 6), (0, 0, 1))
        torch.testing.assert_close(session.tree_logits(tree), again.tree_logits(tree))


@pytest.mark.skipif(library() is None, reason="no bfloat16 products that keep bits")
@cover(case=[*CASES], shape={"chain": CHAIN, "tree": TREE}, together=[("shape",)])
def test_bfloat16_keeps_bits(case: str, shape: DraftBudget) -> None:
    target = decoder(case, torch.bfloat16)
    assert guarantee(target) == "bits"
    replies = run_together(Engine(target, DraftModel(decoder(CASES[case]), 101), shape), PROMPTS, SAMPLINGS)
    assert [reply[0] for reply in replies] == plain(target)
