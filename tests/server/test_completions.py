"""Completions through OpenAI's own client."""

from __future__ import annotations

import threading
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import pytest

from paceline.drafters.suffix import Suffix
from paceline.engine.prefix_cache import PrefixCache
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.apis.completions import CompletionRequest, Completions
from paceline.server.limits import Settings
from paceline.server.models import Models, ModelSource
from paceline.server.worker import Worker
from paceline.text.sandbox import ABANDONED, Unfinished
from tests.support.running import Serving, serving
from tests.support.toys import PROMPT
from tests.support.vocabularies import framed, speaker, tokenizer


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


def scores(plain: LLM, prompt: list[int]) -> list[Any]:
    """Return each token's log-probability given the tokens before it."""
    found: list[Any] = [None]
    with plain.session() as session:
        for before, token in pairwise(prompt):
            session.observe([before])
            found.append(session.next_logits().log_softmax(-1)[token].item())
    return found


@pytest.mark.parametrize("length", [0, 1, 5])
def test_an_echo_has_the_prompts_own_logprobs(served: Serving, plain: LLM, length: int) -> None:
    made = served.openai.completions.create(model="toy", prompt=PROMPT, max_tokens=length, logprobs=2, echo=True)
    reply = plain.generate(PROMPT, Sampling(max_new_tokens=max(1, length), logprobs=2), raw=True)
    said = made.choices[0].logprobs
    assert said is not None
    assert reply.logprobs is not None
    written = [one.chosen for one in reply.logprobs][:length]
    expected = scores(plain, PROMPT) + written
    assert said.token_logprobs is not None
    assert said.token_logprobs[0] is None
    assert said.token_logprobs[1:] == pytest.approx(expected[1:])
    assert len(said.tokens or ()) == len(expected)
    assert said.text_offset == list(range(len(expected)))
    assert said.top_logprobs is not None
    assert said.top_logprobs[0] is None
    assert all(len(tops) in (2, 3) for tops in said.top_logprobs[1:])
    assert made.choices[0].text == plain.tokenizer.decode(PROMPT) + (reply.text if length else "")
    assert made.choices[0].finish_reason == ("length" if len(written) == length else "stop")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(PROMPT), len(written))


def test_echoed_logprobs_of_several_prompts_replies_and_streams(served: Serving, plain: LLM) -> None:
    prompts = [PROMPT, PROMPT[::-1], [5]]
    how: Any = {"model": "toy", "prompt": prompts, "max_tokens": 3, "logprobs": 0, "echo": True, "n": 2, "seed": 1}
    made = served.openai.completions.create(**how, temperature=1.0)
    for at, choice in enumerate(made.choices):
        expected = scores(plain, prompts[at // 2])
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[: len(expected)] == [None, *map(pytest.approx, expected[1:])]
    streamed: list[Any] = [[] for _ in made.choices]
    texts = [""] * len(made.choices)
    for event in served.openai.completions.create(**how, temperature=1.0, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
        if event.choices[0].logprobs:
            streamed[event.choices[0].index] += event.choices[0].logprobs.text_offset
    assert texts == [choice.text for choice in made.choices]
    assert streamed == [choice.logprobs.text_offset for choice in made.choices if choice.logprobs]


def test_a_prompt_that_is_known_is_scored_all_the_same(plain: LLM) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "logprobs": 0}
    with serving(LLM(plain.model, Suffix())) as it:
        it.llm.engine.prefixes = PrefixCache(1 << 20, chunk_invariant=True)
        for echo, cached in ((False, 0), (False, len(PROMPT) - 2), (True, 0)):
            made = it.post("/v1/completions", {**body, "echo": echo}).json()
            assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            assert it.idle()
    assert made["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(scores(plain, PROMPT)[1:])


def test_long_prompts_are_scored_whole(served: Serving, plain: LLM) -> None:
    prompt = [i * 7 % 36 for i in range(200)]  # more than is fed between two rounds
    made = served.openai.completions.create(model="toy", prompt=prompt, max_tokens=0, logprobs=0, echo=True)
    assert made.choices[0].logprobs is not None
    said = made.choices[0].logprobs.token_logprobs
    assert said is not None
    assert said[1:] == pytest.approx(scores(plain, prompt)[1:])


def test_no_tokens_can_be_asked_for(served: Serving) -> None:
    made = served.openai.completions.create(model="toy", prompt="hello", max_tokens=0)
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("", "length")
    assert made.usage is not None
    assert made.usage.completion_tokens == 0
    echoed = served.openai.completions.create(model="toy", prompt="hello", max_tokens=0, echo=True)
    assert echoed.choices[0].text == "hello"
    events = list(served.openai.completions.create(model="toy", prompt="hello", max_tokens=0, stream=True))
    assert [(event.choices[0].text, event.choices[0].finish_reason) for event in events] == [("", "length")]


def test_an_echo_is_streamed_first(served: Serving, plain: LLM) -> None:
    events = list(served.openai.completions.create(model="toy", prompt="hello", max_tokens=4, echo=True, stream=True))
    assert events[0].choices[0].text == "hello"
    reply = plain.generate("hello", Sampling(max_new_tokens=4), raw=True)
    assert "".join(event.choices[0].text for event in events) == "hello" + reply.text


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram"])
@pytest.mark.parametrize("prompt", ["<s>user\nso it is</s> they say", "a  中\ufffd<s>", [1, 5, 1, 9]])
def test_offsets_index_the_echoed_text(kind: str, prompt: Any) -> None:
    with serving(LLM(speaker(framed(tokenizer(kind))))) as it:
        how: Any = {"model": "toy", "prompt": prompt, "max_tokens": 6, "logprobs": 0, "echo": True, "n": 2}
        made = it.openai.completions.create(**how)
        streamed: list[Any] = [([], "") for _ in made.choices]
        for event in it.openai.completions.create(**how, stream=True):
            choice = event.choices[0]
            offsets, text = streamed[choice.index]
            new = choice.logprobs.text_offset if choice.logprobs else []
            streamed[choice.index] = (offsets + new, text + choice.text)
        silent = it.openai.completions.create(**{**how, "logprobs": None})
    assert texts(silent) == texts(made)
    for choice, (offsets, text) in zip(made.choices, streamed, strict=True):
        said = choice.logprobs
        assert said is not None
        assert (said.text_offset, choice.text) == (offsets, text)
        ends = [*offsets[1:], len(text)]
        assert offsets == sorted(offsets)
        if isinstance(prompt, str):
            count = len(it.llm.encode(prompt, raw=True))
            assert offsets[0] == offsets[1] == 0  # a BOS that the prompt does not spell
            assert offsets[count] == len(prompt)
            spelled = [
                text[a:b] for a, b, token in zip(offsets, ends, said.tokens or (), strict=True) if token == "<s>"
            ]
            assert spelled[:2] == ["", "<s>"]


def test_a_client_that_leaves_ends_the_reading_of_its_prompt(plain: LLM) -> None:
    abandoned, context = threading.Event(), copy_context()
    abandoned.set()
    context.run(ABANDONED.set, abandoned)
    body = CompletionRequest(prompt=PROMPT, echo=True, logprobs=0)
    model = Models([ModelSource(("toy",), lambda: Worker(plain), stays=True)]).get("toy")
    with pytest.raises(Unfinished):
        context.run(Completions().prepare, Settings(), body, model, "cmpl-1")
