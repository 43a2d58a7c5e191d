"""Completions through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.llm import LLM
from paceline.sampling import Sampling
from tests.server.running import Serving


def texts(made: Any) -> list[str]:
    return [choice.text for choice in made.choices]


@pytest.mark.parametrize(
    ("prompt", "each"),
    [
        ("hello", ["hello"]),
        (["hello", "what is"], ["hello", "what is"]),
        ([7, 4, 11], [[7, 4, 11]]),
        ([[7, 4, 11], [1, 2]], [[7, 4, 11], [1, 2]]),
    ],
)
def test_every_kind_of_prompt(served: Serving, plain: LLM, prompt: Any, each: list[Any]) -> None:
    made = served.openai.completions.create(model="toy", prompt=prompt, max_tokens=12)
    replies = [plain.generate(one, Sampling(max_new_tokens=12), raw=True) for one in each]
    assert made.object == "text_completion"
    assert texts(made) == [reply.text for reply in replies]
    assert made.usage is not None
    assert made.usage.prompt_tokens == sum(reply.prompt_tokens for reply in replies)
    echoed = served.openai.completions.create(model="toy", prompt=prompt, max_tokens=12, echo=True)
    before = [one if isinstance(one, str) else plain.tokenizer.decode(one) for one in each]
    assert texts(echoed) == [b + t for b, t in zip(before, texts(made), strict=True)]


def test_samples_of_several_prompts_stand_in_order(served: Serving, plain: LLM) -> None:
    how: Any = {"temperature": 1.0, "seed": 2}
    made = served.openai.completions.create(model="toy", prompt=["hello", "what"], max_tokens=8, n=2, best_of=2, **how)
    replies = plain.generate(["hello", "what"], Sampling(max_new_tokens=8, **how), n=2, raw=True)
    assert texts(made) == [reply.text for reply in replies]
    streamed = ["", "", "", ""]
    for event in served.openai.completions.create(
        model="toy", prompt=["hello", "what"], max_tokens=8, n=2, stream=True, **how
    ):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == texts(made)


def test_a_completion_that_says_nothing_has_16_tokens(served: Serving) -> None:
    made = served.openai.completions.create(model="toy", prompt="hello", extra_body={"ignore_eos": True})
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_logprobs_have_their_own_shape(served: Serving, plain: LLM) -> None:
    made = served.openai.completions.create(model="toy", prompt="hello", max_tokens=10, logprobs=2)
    whole = plain.generate("hello", Sampling(max_new_tokens=10, logprobs=2), raw=True)
    said = made.choices[0].logprobs
    assert said is not None
    assert whole.logprobs is not None
    assert said.tokens == [plain.tokenizer.decode([token], skip_special=False) for token in whole.token_ids]
    assert said.token_logprobs == pytest.approx([one.chosen for one in whole.logprobs])
    assert said.text_offset is not None
    for offset, token in zip(said.text_offset, said.tokens, strict=True):
        assert made.choices[0].text[offset:].startswith(token) or token == "</s>"
    assert said.top_logprobs is not None
    for tops, one in zip(said.top_logprobs, whole.logprobs, strict=True):
        assert sorted(tops.values(), reverse=True)[:2] == pytest.approx([value for _, value in one.top])


def test_an_echo_is_streamed_first(served: Serving, plain: LLM) -> None:
    events = list(served.openai.completions.create(model="toy", prompt="hello", max_tokens=4, echo=True, stream=True))
    assert events[0].choices[0].text == "hello"
    reply = plain.generate("hello", Sampling(max_new_tokens=4), raw=True)
    assert "".join(event.choices[0].text for event in events) == "hello" + reply.text
