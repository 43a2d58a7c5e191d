"""Fill-in-the-middle, the best of several completions, and llama.cpp's endpoints for tokens and prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.apis.infill import InfillEncoder
from paceline.server.replies import Usage
from paceline.server.worker import ReplyRound
from tests.support.filler import filler
from tests.support.running import Serving, serving
from tests.support.toys import PROMPT


@pytest.fixture(scope="module")
def coder() -> Iterator[Serving]:
    with serving(filler()) as it:
        yield it


def filled(coder: Serving, *parts: str, **how: Any) -> Any:
    words = coder.llm.tokenizer
    end = words.token_id("<|endoftext|>")
    sampling = Sampling(**{"max_new_tokens": 12, "stop_token_ids": [end, words.token_id("<|file_sep|>")], **how})
    return LLM(coder.llm.model).generate(words.encode("".join(parts), special=False), sampling, raw=True)


def test_a_suffix_makes_it_fill_the_middle(coder: Serving) -> None:
    whole = filled(coder, "<|fim_prefix|>def f(", "<|fim_suffix|>):\n", "<|fim_middle|>")
    made = coder.openai.completions.create(model="toy", prompt="def f(", suffix="):\n", max_tokens=12)
    assert made.choices[0].text == whole.text
    assert made.usage is not None
    assert made.usage.prompt_tokens == whole.prompt_tokens
    (first, second) = coder.openai.completions.create(
        model="toy", prompt=["def f(", "a"], suffix="):\n", max_tokens=12
    ).choices
    assert first.text == whole.text
    assert second.text != first.text


def test_infill_is_llama_cpps(coder: Serving) -> None:
    extra = [{"filename": "a.py", "text": "import b"}]
    whole = filled(
        coder, "<|file_sep|>a.py\nimport b\n", "<|fim_prefix|>x = 1\ndef f(", "<|fim_suffix|>):\n", "<|fim_middle|>"
    )
    body = {"input_prefix": "x = 1\n", "prompt": "def f(", "input_suffix": "):\n", "input_extra": extra}
    # As llama.vim and llama.vscode send them.
    body |= {"n_predict": 12, "samplers": ["top_k", "infill"], "cache_prompt": True, "t_max_predict_ms": 1000}
    made = coder.post("/infill", body).json()
    assert (made["content"], made["stop"]) == (whole.text, True)
    assert made["stop_type"] == {"length": "limit", "eos": "eos", "stop": "eos"}[whole.finish_reason]
    assert (made["tokens_evaluated"], made["tokens_predicted"]) == (whole.prompt_tokens, len(whole.token_ids))
    lines = coder.post("/infill", {**body, "stream": True}).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == whole.text
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    warm = coder.post("/infill", {**body, "n_predict": 0}).json()
    assert (warm["content"], warm["tokens_predicted"], warm["stop_type"]) == ("", 0, "limit")


def test_requests_of_llama_vim(coder: Serving) -> None:
    asked = {
        "input_prefix": "x = 1\n",
        "prompt": "def f(",
        "input_suffix": "):\n",
        "input_extra": [{"filename": "a.py", "text": "import b", "time": [1, 2]}],
        "n_predict": 12,
        "n_indent": 0,
        "stop": ["\n\n\n"],
        "top_k": 40,
        "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
    }
    figures = ("n", "ms", "per_token_ms", "per_second")
    names = [f"timings/{part}_{figure}" for part in ("prompt", "predicted") for figure in figures]
    fields = ["content", *names, "truncated", "tokens_cached"]
    whole = coder.post("/infill", asked).json()
    assert (whole["truncated"], len(whole["timings"])) == (False, 8)
    found = coder.post("/infill", {**asked, "response_fields": [*fields, "unknown"]}).json()
    assert (set(found), found["content"]) == (set(fields), whole["content"])
    assert found["timings/predicted_n"] == 12
    assert found["timings/predicted_per_second"] > 0
    assert coder.post("/infill", {**asked, "n_predict": 0, "response_fields": [""]}).json() == {}
    assert coder.post("/infill", {**asked, "response_fields": []}).json()["timings"]


def test_a_reply_ends_where_its_text_does(coder: Serving) -> None:
    ask = {"input_prefix": "x = 1\n", "prompt": "def f(", "input_suffix": "):\n", "n_predict": 300}
    ask |= {"guided_regex": "ab\ncd[a-z]{250,}", "seed": 1}
    whole = coder.post("/infill", ask).json()
    cut = coder.post("/infill", {**ask, "n_indent": 1000}).json()
    assert "\n" in whole["content"]
    assert cut["stop_type"] == "limit"
    assert cut["tokens_predicted"] < whole["tokens_predicted"]
    assert whole["content"].startswith(cut["content"])


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("indent", "text", "kept"),
    [
        (0, "a\nb", "a\nb"),
        (2, "a\n  b\n\tc\nd", "a\n  b\n\t"),
        (2, "a\n  b\n \t c", "a\n  b\n \t c"),
        (4, "a\n    b\n\n    c", "a\n    b\n"),
        (2, "a\n ", "a\n "),
    ],
)
def test_the_text_ends_at_a_line_of_an_outer_block(indent: int, text: str, kept: str, size: int) -> None:
    writer = InfillEncoder("toy", False, indent)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [event for piece in pieces for event in writer.add(round_of(piece))]
    usage = Usage(1, len(pieces), [])
    assert "".join(event["content"] for event in events) == writer.document(usage)["content"] == kept
    assert writer.document(usage)["stop_type"] == ("eos" if kept == text else "limit")


def round_of(text: str) -> ReplyRound:
    chunk = SimpleNamespace(finish_reason="eos", stop=None, text=text)
    return cast(ReplyRound, SimpleNamespace(chunks=[chunk], text=text))


def test_models_without_the_tokens_refuse(served: Serving) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        answer = served.post(path, body)
        assert answer.status_code == 400
        assert "cannot fill in the middle" in answer.json()["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "hello", "suffix": "", "max_tokens": 1}).status_code == 200


def test_a_suffix_needs_text(coder: Serving) -> None:
    for more, param in (({"prompt": [1, 2]}, "prompt"), ({"echo": True, "logprobs": 1}, "suffix")):
        answer = coder.post("/v1/completions", {"prompt": "a", "suffix": "b", **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = coder.post("/infill", {"input_prefix": "a", "input_suffix": "b", "n": 2})
    assert answer.json()["error"]["param"] == "n"


def test_the_best_replies_have_the_highest_mean_logprob(served: Serving, plain: LLM) -> None:
    how: Any = {"temperature": 1.0, "seed": 5}
    replies = plain.generate(PROMPT, Sampling(max_new_tokens=8, logprobs=0, **how), n=5, raw=True)

    def mean(reply: Any) -> float:
        return float(sum(each.chosen for each in reply.logprobs)) / len(reply.logprobs)

    best = sorted(replies, key=mean, reverse=True)[:2]
    made = served.openai.completions.create(model="toy", prompt=PROMPT, max_tokens=8, n=2, best_of=5, **how)
    assert [choice.text for choice in made.choices] == [reply.text for reply in best]
    assert [choice.index for choice in made.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in made.choices)
    assert made.usage is not None
    assert made.usage.completion_tokens == sum(len(reply.token_ids) for reply in replies)


def test_tokens_and_prompts_as_llama_cpp_has_them(served: Serving) -> None:
    assert served.post("/tokenize", {"content": "hello"}).json()["tokens"] == [7, 4, 11, 11, 14]
    pieces = served.post("/tokenize", {"content": "he", "add_special": True, "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 7, "piece": "h"}, {"id": 4, "piece": "e"}]
    assert served.post("/detokenize", {"tokens": [7, 4]}).json()["content"] == "he"
    messages = [{"role": "user", "content": "hi"}]
    assert served.post("/apply-template", {"messages": messages}).json() == {"prompt": "<user:hi><a:"}
    assert served.post("/apply-template", {}).status_code == 400
