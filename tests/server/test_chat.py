"""Chats through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from paceline.engine.stats import Stats
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.replies import Usage
from tests.support.running import Serving, serving
from tests.support.toys import toy_model

pytestmark = pytest.mark.forks
CHAT: Any = [{"role": "user", "content": "abc abc abc"}]


def alone(plain: LLM, **changes: Any) -> Any:
    return plain.generate(CHAT, Sampling(**{"max_new_tokens": 24, **changes}))


def test_a_chat_equals_the_text_of_the_library(served: Serving, plain: LLM) -> None:
    made = served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=24)
    whole = alone(plain)
    assert made.object == "chat.completion"
    assert made.choices[0].message.content == whole.text
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason == {"eos": "stop", "length": "length"}[whole.finish_reason]
    assert made.usage is not None
    assert made.usage.prompt_tokens == whole.prompt_tokens
    assert made.usage.completion_tokens == len(whole.token_ids)
    assert made.usage.total_tokens == whole.prompt_tokens + len(whole.token_ids)
    speculation = made.usage.model_dump()["speculation"]
    assert speculation["drafter"] == "suffix"
    assert speculation["rounds"] + speculation["accepted"] == len(whole.token_ids)
    assert sum(speculation["accepted_at"]) == speculation["accepted"]


def test_a_stream_joins_to_the_same_text(served: Serving, plain: LLM) -> None:
    events = list(
        served.openai.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = events
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in pieces) == alone(plain).text
    assert [e.choices[0].finish_reason for e in pieces if e.choices[0].finish_reason] == ["length"]
    assert all(event.usage is None for event in pieces)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert len({event.id for event in events}) == 1


def test_acceptance_is_told_in_vllms_shape_too(served: Serving) -> None:
    counted = Stats(0, "bits", rounds=43, drafted=129, accepted=10, accepted_at=[4, 3, 3])
    assert Usage(5, 53, [counted]).vllm()["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 10 / 43,
        "draft_acceptance_rate": 10 / 129,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
    }
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 24}
    whole = served.post("/v1/chat/completions", body).json()
    ours, theirs = whole["usage"]["speculation"], whole["metrics"]["speculative_decoding"]
    assert theirs["num_spec_steps"] == ours["rounds"] == sum(theirs["acceptance_histogram"])
    assert theirs["num_draft_tokens"] == ours["drafted"]
    streamed = served.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    last = streamed.text.strip().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["metrics"].keys() == {"speculative_decoding"}


def test_a_stream_without_usage_has_none(served: Serving) -> None:
    with served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=4, stream=True) as stream:
        assert all(event.choices and event.usage is None for event in stream)


def test_a_stream_ends_with_done(served: Serving) -> None:
    text = served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "stream": True}).text
    assert text.endswith("\n\ndata: [DONE]\n\n")
    assert text.startswith("data: {")


def test_several_samples_equal_the_samples_of_the_library(served: Serving, plain: LLM) -> None:
    how: Any = {"temperature": 1.0, "seed": 5}
    made = served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=24, n=3, **how)
    replies = plain.generate(CHAT, Sampling(max_new_tokens=24, **how), n=3)
    assert [choice.message.content for choice in made.choices] == [reply.text for reply in replies]
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len({reply.text for reply in replies}) == 3
    assert made.usage is not None
    assert made.usage.prompt_tokens == replies[0].prompt_tokens
    texts = ["", "", ""]
    for event in served.openai.chat.completions.create(
        model="toy", messages=CHAT, max_tokens=24, n=3, stream=True, **how
    ):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [reply.text for reply in replies]


def test_concurrent_chats_do_not_change_one_another(served: Serving, plain: LLM) -> None:
    async def ask(seed: int) -> str | None:
        made = await served.openai_async.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=16, temperature=1.0, seed=seed
        )
        return made.choices[0].message.content

    async def stream(seed: int) -> str:
        events = await served.openai_async.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=16, temperature=1.0, seed=seed, stream=True
        )
        return "".join([event.choices[0].delta.content or "" async for event in events])

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(ask(seed) for seed in range(6)), *(stream(seed) for seed in range(6)))

    expected = [alone(plain, max_new_tokens=16, temperature=1.0, seed=seed).text for seed in range(6)]
    assert asyncio.run(all_of_them()) == expected * 2


def test_logprobs_are_taken_before_sampling(served: Serving, plain: LLM) -> None:
    how: Any = {"temperature": 1.0, "seed": 5}
    made = served.openai.chat.completions.create(
        model="toy", messages=CHAT, max_tokens=12, logprobs=True, top_logprobs=3, **how
    )
    whole = alone(plain, max_new_tokens=12, logprobs=3, **how)
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == list(whole.text)
    assert [entry.logprob for entry in content] == pytest.approx([said.chosen for said in whole.logprobs])
    for entry, said in zip(content, whole.logprobs, strict=True):
        assert entry.bytes == list(entry.token.encode())
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([value for _, value in said.top])
        assert [top.token for top in entry.top_logprobs] == [plain.tokenizer.decode([token]) for token, _ in said.top]


def test_logprobs_of_a_stream(served: Serving) -> None:
    how: Any = {"model": "toy", "messages": CHAT, "max_tokens": 12, "logprobs": True}
    whole = served.openai.chat.completions.create(**how)
    events = list(served.openai.chat.completions.create(**how, stream=True))
    pieces = [entry for e in events if e.choices[0].logprobs for entry in e.choices[0].logprobs.content]
    content = whole.choices[0].logprobs.content
    assert [entry.token for entry in pieces] == [entry.token for entry in content]
    assert [entry.logprob for entry in pieces] == pytest.approx([entry.logprob for entry in content])
    assert all(entry.top_logprobs == [] for entry in pieces)


def test_speculation_can_be_chosen_and_does_not_change_the_text(served: Serving, plain: LLM) -> None:
    def ask(speculation: Any) -> Any:
        body = {"messages": CHAT, "max_tokens": 24, "speculation": speculation}
        made = served.post("/v1/chat/completions", body).json()
        assert made["choices"][0]["message"]["content"] == alone(plain).text
        return made["usage"]["speculation"]

    assert ask("auto")["drafter"] == "suffix"
    off = ask("off")
    assert (off["drafter"], off["drafted"], off["rounds"]) == (None, 0, 24)
    assert ask({"drafter": "ngram"})["drafter"] == "ngram"
    assert ask({"max_draft": 0})["drafted"] == 0
    few = ask({"drafter": "suffix", "max_draft": 1})
    assert len(few["accepted_at"]) <= 1
    assert few["drafted"] <= few["rounds"]


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_is_drafted_and_counted(served: Serving, plain: LLM, parts: bool) -> None:
    text = alone(plain, max_new_tokens=48).text
    halves: Any = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    prediction: Any = {"type": "content", "content": halves if parts else text}
    made = served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=48, prediction=prediction)
    assert made.choices[0].message.content == text
    assert made.usage is not None
    assert made.usage.completion_tokens_details is not None
    assert made.usage.completion_tokens_details.accepted_prediction_tokens == 48
    assert made.usage.completion_tokens_details.rejected_prediction_tokens == 0
    assert made.usage.model_dump()["speculation"]["rounds"] <= 6
    other: Any = {"type": "content", "content": "zzzz" * 100_000}
    made = served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=48, prediction=other)
    assert made.choices[0].message.content == text
    assert made.usage is not None
    assert made.usage.completion_tokens_details is not None
    counts = made.usage.completion_tokens_details
    assert counts.accepted_prediction_tokens is not None
    assert counts.rejected_prediction_tokens is not None
    assert counts.accepted_prediction_tokens < 48
    assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens == 48, "a reply has room for no more"


@pytest.mark.parametrize("wrong", ["text", {"type": "content"}, {"type": "image", "content": "a"}, {"content": "a"}])
def test_invalid_predictions_are_refused(served: Serving, wrong: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as caught:
        served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=4, prediction=wrong)
    assert "prediction" in str(caught.value.param)


def test_a_trace_says_how_each_token_came_about(served: Serving, plain: LLM) -> None:
    body = {
        "messages": CHAT,
        "max_tokens": 40,
        "trace": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = served.post("/v1/chat/completions", body).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    traced = [choice for choice in choices if "trace" in choice]
    tokens = [token for choice in traced for token in choice["trace"]]
    whole = alone(plain, max_new_tokens=40, logprobs=0)
    assert [token["id"] for token in tokens] == whole.token_ids
    assert "".join(token["text"] for token in tokens) == whole.text
    assert [token["p"] for token in tokens] == pytest.approx(
        [math.exp(said.chosen) for said in whole.logprobs], abs=1e-5
    )
    usage = events[-1]["usage"]["speculation"]
    assert sum(token["origin"] == "draft" for token in tokens) == usage["accepted"]
    assert sum(choice["round"]["drafted"] for choice in traced) == usage["drafted"]
    assert {token["drafter"] for token in tokens} <= {None, "suffix"}
    whole_reply = served.post("/v1/chat/completions", {**body, "stream": False, "stream_options": None}).json()
    assert [token["id"] for token in whole_reply["choices"][0]["trace"]] == whole.token_ids


def test_text_parts_and_developers_are_understood(served: Serving) -> None:
    def ask(messages: Any) -> Any:
        made = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8})
        return made.json()["choices"][0]["message"]["content"], made.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "hello"}]
    assert ask([{"role": "user", "content": parts}]) == ask([{"role": "user", "content": "hello"}])
    assert ask([{"role": "developer", "content": "be"}, *CHAT]) == ask([{"role": "system", "content": "be"}, *CHAT])


CALL = {"function": {"name": "f", "arguments": "{}"}}
BEGUN: Any = [*CHAT, {"role": "assistant", "content": "so a "}]


def test_the_last_message_can_be_continued(served: Serving, plain: LLM) -> None:
    made = served.openai.chat.completions.create(
        model="toy", messages=BEGUN, max_tokens=12, extra_body={"continue_final_message": True}
    )
    text = "<user:abc abc abc><assistant:so a "
    assert made.choices[0].message.content == plain.generate(text, Sampling(max_new_tokens=12), raw=True).text
    closed = served.openai.chat.completions.create(
        model="toy", messages=BEGUN, max_tokens=12, extra_body={"add_generation_prompt": False}
    )
    text += ">"
    assert closed.choices[0].message.content == plain.generate(text, Sampling(max_new_tokens=12), raw=True).text


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (CHAT, {}, "continue_final_message"),
        (BEGUN, {"add_generation_prompt": True}, "continue_final_message"),
        ([*CHAT, {"role": "assistant", "content": "", "tool_calls": [CALL]}], {}, "continue_final_message"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(served: Serving, messages: Any, more: Any, param: str) -> None:
    body = {"messages": messages, "continue_final_message": True, **more}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    model = toy_model()
    model.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with serving(LLM(model)) as it:
        answer = it.post("/v1/chat/completions", {"messages": BEGUN, "continue_final_message": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"


def test_a_reply_can_be_sent_back(served: Serving) -> None:
    first = served.openai.chat.completions.create(model="toy", messages=CHAT, max_tokens=8)
    more = [*CHAT, first.choices[0].message, {"role": "user", "content": "more"}]
    assert served.openai.chat.completions.create(model="toy", messages=more, max_tokens=8).choices[0].message.content
