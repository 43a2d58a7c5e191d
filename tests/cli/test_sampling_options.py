"""Sampling options that need the model's tokenizer or chat template."""

from __future__ import annotations

import pytest

from paceline.cli.options import SamplingOptions
from paceline.errors import InvalidOption
from paceline.sampling.thinking import ThinkingBudget
from tests.support.scripted import scripted


@pytest.mark.parametrize("begun", ["", "<think>\n"])
def test_a_thinking_budget_takes_its_texts_from_the_template(begun: str) -> None:
    template = "{# <think> </think> #}go:" + begun
    llm = scripted("<think>I think and think.".removeprefix("<think>" if begun else ""), template)
    options = SamplingOptions(thinking_budget=3, max_new_tokens=40, temperature=0.0)
    options.check()
    how = options.resolve(llm)
    assert how.thinking_budget == ThinkingBudget(3, "<think>", "</think>")
    thought = llm.tokenizer.decode(llm.tokenizer.encode("I think and think.", special=False)[:3])
    text = llm.generate([{"role": "user", "content": "go"}], how).text
    assert text.removeprefix("<think>").startswith(thought + "</think>")


def test_a_thinking_budget_needs_a_model_that_reasons() -> None:
    with pytest.raises(InvalidOption, match="no reasoning"):
        SamplingOptions(thinking_budget=3).resolve(scripted("yes", "go:"))
    with pytest.raises(InvalidOption, match="thinking_budget"):
        SamplingOptions(thinking_budget=-1).check()
    with pytest.raises(InvalidOption, match="--thinking-budget does not work with a grammar"):
        SamplingOptions(thinking_budget=3, regex="a*").check()


def test_dry_reaches_the_reply() -> None:
    llm, chat = scripted("a b a b a b a b. " * 4, "go:"), [{"role": "user", "content": "go"}]

    def text(**given: object) -> str:
        how = SamplingOptions(temperature=0.0, max_new_tokens=30, **given).resolve(llm)  # type: ignore[arg-type]
        return llm.generate(chat, how).text

    plain = text()
    assert text(dry_multiplier=50.0) != plain
    assert text(dry_multiplier=50.0, dry_sequence_breaker=["a", "b"]) == plain
    assert text(dry_multiplier=50.0, dry_allowed_length=100) == text(dry_multiplier=50.0, dry_penalty_last_n=0) == plain
    assert text(dry_multiplier=1.0, dry_base=40.0) != plain == text(dry_multiplier=1.0, dry_base=1.0)
