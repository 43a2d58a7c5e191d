"""Every parameter has an effect, and out-of-range values are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from tests.support.running import Serving, serving
from tests.support.toys import toy_model
from tests.support.vocabularies import byte_level

CHAT: Any = [{"role": "user", "content": "go on"}]
LONG: Any = [{"role": "user", "content": "go on " * 35}]
"""Fills most of the context."""
BASE: dict[str, Any] = {"temperature": 1.0, "seed": 3}

HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 3}, {"top_k": 3}),
    ({"min_p": 0.3}, {"min_p": 0.3}),
    ({"typical_p": 0.3}, {"typical_p": 0.3}),
    ({"top_n_sigma": 0.5}, {"top_n_sigma": 0.5}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.05}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    (
        {"top_k": 3, "dry_multiplier": 2, "dry_base": 0, "dry_allowed_length": 1, "dry_sequence_breakers": ["z"]},
        {"top_k": 3, "dry_multiplier": 2, "dry_allowed_length": 1, "dry_sequence_breakers": ("z",)},
    ),
    (
        {"top_k": 3, "dry_multiplier": 2, "dry_base": 3.0, "dry_allowed_length": 0, "dry_penalty_last_n": 9},
        {"top_k": 3, "dry_multiplier": 2, "dry_base": 3.0, "dry_allowed_length": 0, "dry_penalty_last_n": 9},
    ),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    ({"logit_bias": {"5": 8, "6": -100}}, {"logit_bias": {5: 8.0, 6: -100.0}}),
    ({"seed": 4}, {"seed": 4}),
    ({"stop": "d"}, {"stop": "d"}),
    ({"stop": ["zz", "hw"]}, {"stop": ["zz", "hw"]}),
    ({"stop_token_ids": [3]}, {"stop_token_ids": [3]}),
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"top_k": 3, "ignore_eos": True}, {"top_k": 3, "ignore_eos": True}),
    ({"top_k": 3, "min_tokens": 30}, {"top_k": 3, "min_new_tokens": 30}),
]


@pytest.fixture(scope="module")
def unasked(plain: LLM) -> str:
    """Return the text without any of the parameters."""
    return plain.generate(CHAT, Sampling(max_new_tokens=40, **BASE)).text


@pytest.mark.parametrize(("asked", "meant"), HONOURED, ids=lambda value: ",".join(value))
def test_honoured(served: Serving, plain: LLM, unasked: str, asked: dict[str, Any], meant: dict[str, Any]) -> None:
    body = {"max_tokens": 40, **BASE, **asked}
    chat = served.post("/v1/chat/completions", {"messages": CHAT, **body}).json()
    wanted = plain.generate(CHAT, Sampling(**{"max_new_tokens": 40, **BASE, **meant}))
    assert chat["choices"][0]["message"]["content"] == wanted.text
    assert wanted.text != unasked  # or this would say nothing
    text = served.post("/v1/completions", {"prompt": "<user:go on><a:", **body}).json()
    assert text["choices"][0]["text"] == wanted.text


def test_no_top_k_is_spelled_in_two_ways(served: Serving) -> None:
    def ask(**more: Any) -> Any:
        body = {"messages": CHAT, "max_tokens": 20, **BASE, **more}
        return served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    assert ask() == ask(top_k=-1) == ask(top_k=0) != ask(top_k=3)


def test_the_newer_name_of_max_tokens(served: Serving) -> None:
    for body in ({"max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 7}):
        made = served.post("/v1/chat/completions", {"messages": CHAT, **body}).json()
        assert made["usage"]["completion_tokens"] == 7
        assert made["choices"][0]["finish_reason"] == "length"


def test_a_reply_without_a_limit_goes_to_the_end_of_the_context(served: Serving) -> None:
    made = served.post("/v1/chat/completions", {"messages": LONG, "ignore_eos": True}).json()
    assert made["usage"]["total_tokens"] == served.llm.model.target.context_length
    assert made["choices"][0]["finish_reason"] == "length"


def test_the_default_is_what_the_model_recommends(served: Serving) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 5}
    with serving(LLM(toy_model(generation))) as it:
        entry = it.get("/v1/models").json()["data"][0]["paceline"]
        assert (entry["sampling"]["temperature"], entry["sampling"]["top_k"]) == (0.6, 5)
        how = {"messages": CHAT, "max_tokens": 20, "seed": 3}
        made = it.post("/v1/chat/completions", how).json()["choices"][0]["message"]["content"]
        wanted = LLM(toy_model()).generate(CHAT, Sampling(temperature=0.6, top_k=5, seed=3, max_new_tokens=20))
        assert made == wanted.text
        greedy = it.post("/v1/chat/completions", {**how, "temperature": 0}).json()["choices"][0]["message"]["content"]
        assert greedy != made


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"top_p": 0}, {"temperature": 0.0}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"n_predict": 5, "max_tokens": None}, {"max_new_tokens": 5}),
        ({"n_predict": 40}, {}),
    ],
    ids=str,
)
def test_other_ways_to_say_it(served: Serving, plain: LLM, asked: dict[str, Any], meant: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 40, **BASE, **asked}
    made = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert made == plain.generate(CHAT, Sampling(**{"max_new_tokens": 40, **BASE, **meant})).text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_minus_one_token_fills_the_context(served: Serving, name: str) -> None:
    made = served.post("/v1/chat/completions", {"messages": LONG, "ignore_eos": True, name: -1}).json()
    assert made["usage"]["total_tokens"] == served.llm.model.target.context_length


def test_no_thinking_is_told_to_the_template() -> None:
    model = toy_model()
    model.tokenizer.chat_template = "{% if enable_thinking is false %}a{% else %}bbb{% endif %}"
    with serving(LLM(model)) as it:

        def count(**more: Any) -> int:
            body = {"messages": CHAT, "max_tokens": 1, **more}
            return int(it.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"])

        assert (count(), count(reasoning_effort="none")) == (3, 1)
        assert count(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"nonsense": None}, "nonsense"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 0.0001}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repeat_penalty": 1e-300}, "repeat_penalty"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
    ({"mirostat": 2}, "mirostat"),
    ({"mirostat": False}, "mirostat"),
    ({"xtc_probability": 1.1}, "xtc_probability"),
    ({"xtc_threshold": -0.1}, "xtc_threshold"),
    ({"top_n_sigma": -2}, "top_n_sigma"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers.0"),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"presence_penalty": 2.01}, "presence_penalty"),
    ({"frequency_penalty": -2.01}, "frequency_penalty"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"n_predict": 3}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop_token_ids": [37]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"logit_bias": {"37": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"01": 1}}, "logit_bias.01"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"speculation": "on"}, "speculation"),
    ({"speculation": {"drafter": "eagle9"}}, "speculation.drafter"),
    ({"speculation": {"max_draft": -1}}, "speculation.max_draft"),
    ({"speculation": {"depth": 1}}, "speculation.depth"),
    ({"timeout": 0}, "timeout"),
    ({"trace": 1}, "trace"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json"),
    ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"], "regex": "a"}, "regex"),
    ({"ebnf": "root ::= ("}, "ebnf"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "response_format"),
    ({"logit_bias": [[1, "a"]]}, "logit_bias"),
]

CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": None, "n_predict": 0}, "n_predict"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
    ({"functions": [{"name": "a"}], "tools": [{"type": "function", "function": {"name": "b"}}]}, "functions"),
    ({"function_call": {"name": "a"}}, "function_call"),
    ({"audio": {}}, "audio"),
    ({"best_of": 2}, "best_of"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"reasoning_effort": "great"}, "reasoning_effort"),
    ({"reasoning": "off", "reasoning_effort": "low"}, "reasoning"),
    ({"enable_thinking": False, "think": True}, "enable_thinking"),
    ({"reasoning": {"effort": "low"}, "thinking": {"type": "disabled"}}, "reasoning"),
    ({"think": "hard"}, "think"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages.0.audio"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
]

TEXT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": [37]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": "a" * 256}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": CHAT}, "messages"),
    ({"prompt": ["a"] * 65}, "n"),
]


def refused(served: Serving, path: str, body: dict[str, Any], param: str) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["message"]


def named(case: Any) -> str | None:
    return str(case)[:60] if isinstance(case, dict) else None


@pytest.mark.parametrize(("body", "param"), [*REFUSED, *CHAT_REFUSED], ids=named)
def test_chats_refuse(served: Serving, body: dict[str, Any], param: str) -> None:
    refused(served, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, **body}, param)


@pytest.mark.parametrize(("body", "param"), [*REFUSED, *TEXT_REFUSED], ids=named)
def test_completions_refuse(served: Serving, body: dict[str, Any], param: str) -> None:
    refused(served, "/v1/completions", {"prompt": "hello", "max_tokens": 4, **body}, param)


def test_a_missing_prompt_is_named(served: Serving) -> None:
    refused(served, "/v1/chat/completions", {}, "messages")
    refused(served, "/v1/completions", {}, "prompt")


def test_a_prompt_that_is_too_long_says_so(served: Serving) -> None:
    answer = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "more",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "modalities": ["text"], "parallel_tool_calls": True, "logprobs": None},
        {"functions": None, "audio": None, "stop": None, "tools": None, "n": 1, "response_format": {"type": "text"}},
        {"functions": [], "function_call": "auto", "best_of": 1, "verbosity": "medium", "reasoning_effort": None},
        {"functions": [], "function_call": None, "tool_choice": "auto", "tools": [], "reasoning_effort": "none"},
        {"cache_prompt": True, "n_keep": -1, "id_slot": 0, "keep_alive": "5m", "ttl": 60, "timings_per_token": True},
        {"mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0, "dry_multiplier": 0, "repeat_last_n": 64},
        {"repeat_penalty": 1.0, "repeat_last_n": 64, "tfs_z": 1.0, "lora": [], "n_probs": 0, "grammar": ""},
        {"use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "add_special_tokens": False},
        {"include_stop_str_in_output": False, "priority": 0, "echo": False, "truncate_prompt_tokens": None},
    ],
)
def test_parameters_without_meaning_have_no_effect(served: Serving, more: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 8}
    bare, full = (served.post("/v1/chat/completions", {**body, **extra}).json() for extra in ({}, more))
    assert full["choices"] == bare["choices"]


def test_additions_of_other_providers_to_messages_and_tools_have_no_effect(talker: Serving) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "c"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    extras = {"reasoning": None, "reasoning_details": [], "provider_specific_fields": {}, "thinking_blocks": []}
    more = [
        {**chat[0], "content": [{"type": "text", "text": "a", **cached}], **cached},
        {**chat[1], **extras, "tool_calls": [{**call, "index": 0, "provider_specific_fields": {}}]},
        {**chat[2], **extras},
    ]
    tools = [{**tool, "function": {"name": "add", **cached}, **cached}]
    bodies = [{"messages": chat, "tools": [tool]}, {"messages": more, "tools": tools}]
    answers = [talker.post("/v1/chat/completions", {**body, "max_tokens": 4}) for body in bodies]
    assert answers[1].status_code == 200, answers[1].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_agents_may_have_hundreds_of_tools(served: Serving) -> None:
    from paceline.server.apis.messages import MessagesRequest, chat_prompt
    from paceline.server.apis.responses_request import ResponsesRequest

    ask: dict[str, Any] = {"role": "user", "content": "x"}
    tools = [{"type": "function", "name": f"t{i}"} for i in range(300)]
    responses = ResponsesRequest.model_validate({"input": [ask], "tools": tools})
    client = [{"name": tool["name"], "input_schema": {}} for tool in tools]
    messages = MessagesRequest.model_validate({"messages": [ask], "tools": client, "max_tokens": 1})
    for offer in (responses.tool_offer, chat_prompt(messages).tools):
        assert len(offer.offered) == 300
    refused(served, "/v1/chat/completions", {"messages": CHAT, "tools": [{}] * 513}, "tools")


def test_models_that_are_not_served(served: Serving) -> None:
    body = {"messages": CHAT, "max_tokens": 2}
    for name in ("toy", "other/name"):
        assert served.post("/v1/chat/completions", {**body, "model": name}).status_code == 200
    answer = served.post("/v1/chat/completions", {**body, "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["param"] == "model"


def test_too_many_stop_strings_are_counted(served: Serving) -> None:
    answer = served.post("/v1/completions", {"prompt": "hello", "stop": ["a"] * 17})
    assert answer.json()["error"]["message"] == "stop: at most 16 stop strings are allowed, got 17"


def test_a_schema_may_be_left_out(talker: Serving) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    (end,) = byte_level().encode("}")
    body = {"messages": CHAT, "max_tokens": 60, "response_format": form, "logit_bias": {str(end): 100}}
    made = talker.post("/v1/chat/completions", body).json()
    assert json.loads(made["choices"][0]["message"]["content"]) == {}
