"""Speculation with two sessions writes the same text as the target without a drafter."""

from __future__ import annotations

import pytest

import paceline
from paceline.engine.detokenizer import Chunk
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.sampling.grammar import Grammar
from paceline.sampling.parameters import Sampling
from tests.support.cover import cover
from tests.support.toys import toy_llm, toy_model

PROMPT = "abcabcab"
SAMPLINGS = (
    Sampling(max_new_tokens=40),
    Sampling(max_new_tokens=40, temperature=0.8, seed=3),
    Sampling(max_new_tokens=40, temperature=1.2, top_k=9, repetition_penalty=1.3, seed=5, ignore_eos=True),
    Sampling(max_new_tokens=7, temperature=0.5, seed=1, stop=["a"]),
)


def written(target: LLM, drafter: LLM, sampling: Sampling, length: int = 4) -> list[list[Chunk]]:
    with target.session() as first, drafter.session() as second:
        return list(paceline.speculate(first, second, PROMPT, sampling, length=length))


@cover(
    sampling=dict(zip(("greedy", "warm", "penalised", "stopped"), SAMPLINGS, strict=True)),
    drafter=[0, 5],
    together=[("sampling",), ("drafter",)],
)
def test_the_reply_equals_plain_decoding_of_the_target(sampling: Sampling, drafter: int) -> None:
    alone = toy_llm().generate(PROMPT, sampling)
    rounds = written(toy_llm(), LLM(toy_model(seed=drafter)), sampling)
    chunks = [chunk for chunks in rounds for chunk in chunks]
    assert [chunk.token_id for chunk in chunks] == alone.token_ids
    assert "".join(chunk.text for chunk in chunks) == alone.text
    assert chunks[-1].finish_reason == alone.finish_reason
    if drafter == 0 and len(alone.token_ids) > 6:  # the same model drafts all that it would write
        assert len(rounds) < len(alone.token_ids) / 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_candidates_are_judged_by_their_distribution(rule: str) -> None:
    sampling = Sampling(max_new_tokens=60, temperature=0.9, seed=2, rule=rule, ignore_eos=True)  # type: ignore[arg-type]
    rounds = written(toy_llm(), toy_llm(), sampling)
    # The drafter is the target: p = q, so every candidate is accepted.
    assert all(len(chunks) == 5 for chunks in rounds[:-1])
    assert sum(map(len, rounds)) == 60


def test_sessions_hold_the_text_and_can_be_used_again() -> None:
    target, drafter = toy_llm().session(), LLM(toy_model(seed=5)).session()
    once = [c.token_id for cs in paceline.speculate(target, drafter, PROMPT, max_new_tokens=9) for c in cs]
    assert target.history == [*target.encode(PROMPT), *once]
    again = [c.token_id for cs in paceline.speculate(target, drafter, PROMPT, max_new_tokens=9) for c in cs]
    assert once == again


def test_no_tokens_no_rounds() -> None:
    assert written(toy_llm(), toy_llm(), Sampling(max_new_tokens=0)) == []


def test_unsupported_options_of_two_sessions_are_refused() -> None:
    for bad in (
        {"length": 0},
        {"length": True},
        {"max_tokens": 3},
        {"grammar": Grammar.regex("a+")},
        {"prediction": "a"},
    ):
        with pytest.raises(InvalidOption):
            paceline.speculate(toy_llm().session(), toy_llm().session(), PROMPT, **bad)  # type: ignore[arg-type]
