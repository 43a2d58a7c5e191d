"""DRY, XTC, top-n-sigma and thinking budgets change the text, and drafts do not change it further."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.sampling.thinking import ThinkingBudget
from paceline.testing import Oracle, run, run_together
from paceline.types import DraftBudget
from tests.support.cover import cover
from tests.support.plain import plain_reply, plain_text
from tests.support.toys import ALPHABET, toy_model, toy_target

TOY = toy_target(layers=1)
OTHER = toy_target(seed=9, layers=1)
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
PLAIN = Sampling(max_new_tokens=28, temperature=0.8, seed=3)
DRY = {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()}
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
SAMPLINGS = {
    "dry": replace(PLAIN, temperature=0.3, **DRY),
    "greedy dry": replace(PLAIN, temperature=0.0, **DRY),
    "dry of the last tokens": replace(PLAIN, temperature=0.3, dry_penalty_last_n=12, **DRY),
    "xtc": replace(PLAIN, **XTC),
    "top-n-sigma": replace(PLAIN, top_n_sigma=0.8),
    "all": replace(PLAIN, top_n_sigma=2.0, top_k=30, min_p=0.01, **DRY, **XTC),
}
SHAPES = {"chain": DraftBudget.chain(5), "tree": DraftBudget(14, 4, 3)}


def drafter(kind: str, text: list[int]) -> Drafter:
    made: dict[str, Drafter] = {
        "ngram": NGram(),
        "suffix": Suffix(),
        "another model": DraftModel(OTHER, 37),
        "the model itself": DraftModel(TOY, 37),
        "oracle": Oracle(text, 0.7, 37),
    }
    return made[kind]


KINDS = ["ngram", "suffix", "another model", "the model itself", "oracle"]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_each_sampler_changes_the_text(sampling: Sampling) -> None:
    without = replace(PLAIN, temperature=sampling.temperature)
    assert plain_text(TOY, PROMPT, sampling) != plain_text(TOY, PROMPT, without)


@cover(sampling=SAMPLINGS, kind=KINDS, shape=SHAPES)
def test_drafts_change_nothing_of_the_text(sampling: Sampling, kind: str, shape: DraftBudget) -> None:
    plain, finish = plain_reply(TOY, PROMPT, sampling)
    tokens, ended, stats = run(TOY, PROMPT, sampling, drafter(kind, PROMPT + plain), shape)
    assert (tokens, ended) == (plain, finish)
    if kind == "the model itself":
        assert stats.accepted > 20, "target and drafter must agree on every decision of the samplers"


def test_a_batch_of_them_gives_each_its_own_text() -> None:
    samplings = [replace(sampling, max_new_tokens=12) for sampling in SAMPLINGS.values()]
    prompts = [PROMPT[: 4 + i] for i in range(len(samplings))]
    engine = Engine(TOY, NGram(), SHAPES["tree"])
    together = run_together(engine, prompts, samplings)
    for prompt, sampling, (tokens, finish, _) in zip(prompts, samplings, together, strict=True):
        assert (tokens, finish) == plain_reply(TOY, prompt, sampling)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_without_drafts_every_rule_gives_the_text_of_match(rule: str) -> None:
    how = replace(SAMPLINGS["all"], rule=rule)
    assert run(TOY, PROMPT, how)[:2] == plain_reply(TOY, PROMPT, SAMPLINGS["all"])


BUDGETS = {
    "begun by the prompt": ("<", "'>", "it is <"),
    "begun by the prompt, by hand": ("", "'>", "it is"),
    "begun by the reply": ("k", "'>", "it is"),
}
"""Texts before and after the reasoning, and a prompt. A bias decides the first letter of the toy's reply."""
MODEL = toy_model(layers=2)
LLM_ALONE = LLM(MODEL)


@cache
def reply(prompt: str, how: Sampling, kind: str = "", shape: str = "") -> list[int]:
    if not kind:
        return LLM_ALONE.generate(prompt, how, raw=True).token_ids
    text = LLM_ALONE.encode(prompt, raw=True) + reply(prompt, how)
    return LLM(MODEL, drafter(kind, text), SHAPES[shape]).generate(prompt, how, raw=True).token_ids


@cover(texts=BUDGETS, budget=[0, 1, 7], temperature=[0.0, 1.5])
def test_a_thinking_budget_forces_the_end_at_its_place(
    texts: tuple[str, str, str], budget: int, temperature: float
) -> None:
    start, end, prompt = texts
    rarely, always = {ALPHABET.index("'"): -30.0}, {ALPHABET.index("k"): 30.0}
    how = Sampling(
        max_new_tokens=20,
        temperature=temperature,
        seed=1,
        ignore_eos=True,
        logit_bias=rarely | (always if start == "k" else {}),
        reasoning=(start, end),
        thinking_budget=budget,
    )
    tokens, at = reply(prompt, how), budget + (start == "k")
    assert tokens[at : at + 2] == [ALPHABET.index(letter) for letter in end]
    assert len(tokens) == 20
    assert reply(prompt, replace(how, thinking_budget=None))[:at] == tokens[:at]
    for kind, shape in (("ngram", "chain"), ("oracle", "tree"), ("another model", "tree")):
        assert reply(prompt, how, kind, shape) == tokens


def test_a_thinking_budget_counts_no_token_twice() -> None:
    """A drafter can be behind the text that the target has read."""
    budget, row = ThinkingBudget(4, "", "q").limit(toy_model().tokenizer), torch.zeros(37)
    assert [len(budget.forced(Prefix([1] * size, (), 1), 9)) for size in (4, 2, 4, 5, 3, 5)] == [0, 0, 0, 1, 0, 1]
    assert budget(Prefix([1] * 4, (), 1), row.clone()).tolist() == row.tolist()


@pytest.mark.parametrize("wrong", [(3, 5, "q"), (3, "", None), (3, "", ""), (3, "", "q", 1), ("a", "", "q")])
def test_a_malformed_thinking_budget_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidOption):
        Sampling(thinking_budget=ThinkingBudget(*wrong))


def test_reasoning_that_ends_within_its_budget_is_not_changed() -> None:
    how = Sampling(max_new_tokens=30, temperature=3.0, seed=1, ignore_eos=True, reasoning=("", "q"))
    plain, end = reply("it is", how), ALPHABET.index("q")
    within = plain.index(end)
    assert within > 2
    for budget in (within + 1, within):
        assert reply("it is", replace(how, thinking_budget=budget)) == plain
    assert reply("it is", replace(how, thinking_budget=within - 1))[:within] == [*plain[: within - 1], end]
