"""Log-probabilities of a prompt, chunk by chunk, and with an engine that suspends the prefill."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.engine import Engine
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.sampling.parameters import Sampling
from tests.support.toys import toy_llm

PROMPT = [i * 5 % 36 for i in range(40)]


def expected() -> list[float]:
    with toy_llm().session() as session:
        session.observe(PROMPT[:1])
        rows = session.logits_after(PROMPT[1:]).log_softmax(-1)
    return [rows[at, token].item() for at, token in enumerate(PROMPT[1:])]


def said(scores: PromptLogprobs) -> list[float]:
    first, *rest = scores.tokens
    assert first is None
    return [one.chosen for one in rest if one]


@pytest.mark.parametrize("cut", [1, 7, 39, 100])
def test_chunks_of_any_size_and_repeated_chunks_give_the_same(cut: int) -> None:
    logits = torch.randn(39, 36, generator=torch.Generator().manual_seed(0))
    whole, parts = PromptLogprobs(3), PromptLogprobs(3)
    whole.push(0, PROMPT[1:], logits)
    for _ in range(2):
        for at in range(0, 39, cut):
            parts.push(at, PROMPT[1:][at : at + cut], logits[at : at + cut])
    assert said(parts) == pytest.approx(said(whole))
    assert [one and [token for token, _ in one.top] for one in parts.tokens] == [None, *logits.topk(3).indices.tolist()]


def test_a_suspended_prompt_is_scored_once_and_whole() -> None:
    llm, scores = toy_llm(), PromptLogprobs()
    engine: Engine = llm.engine
    request = llm.start(PROMPT, Sampling(max_new_tokens=4), scores=scores)
    engine.feed(request, 16)
    engine.suspend(request)
    engine.resume(request)
    engine.prefill(request)
    engine.step([request])
    engine.finish(request)
    assert said(scores) == pytest.approx(expected())
