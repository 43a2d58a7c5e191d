"""Parameters with the names and formats of other servers have the same effect as there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.server.apis.chat_completions import ChatRequest
from paceline.text.tokenizer import Tokenizer
from tests.support.running import Serving

pytest.importorskip("llguidance")

CHAT = [{"role": "user", "content": "go"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | item+ "."\nitem ::= [0-9] [a-b]'
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
]


def text(it: Serving, path: str, **body: Any) -> str:
    asked = {"prompt": "go"} if path == "/v1/completions" else {"messages": CHAT}
    answer = it.post(path, {**asked, "max_tokens": 60, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_form_of_a_schema_is_the_same(talker: Serving, path: str) -> None:
    texts = {text(talker, path, seed=1, temperature=1, **form) for form in FORMS}
    (only,) = texts
    assert json.loads(only) in ({"a": "x"}, {"a": "y"})


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "name": "n", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
    ],
    ids=str,
)
def test_every_form_of_a_schema_in_responses(talker: Serving, form: dict[str, Any]) -> None:
    made = talker.post("/v1/responses", {"input": "go", "max_output_tokens": 60, "text": {"format": form}}).json()
    assert json.loads(made["output"][0]["content"][0]["text"]).keys() == {"a"}
    assert made["text"]["format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"guided_choice": ["yes", 'n"o\n']}, {"yes", 'n"o\n'}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"ebnf": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"guided_grammar": 'root ::= ("y" "es") | "no"'}, {"yes", "no"}),
        ({"guided_grammar": 'start: "yes" | "no"'}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"a"}),
        ({"regex": "a|b"}, {"a", "b"}),
        ({"structured_outputs": {"regex": "a|b"}}, {"a", "b"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_other_constraints(talker: Serving, path: str, form: dict[str, Any], texts: set[str]) -> None:
    assert text(talker, path, **form) in texts


def test_a_grammar_of_several_rules_is_kept(talker: Serving) -> None:
    found = {
        text(talker, "/v1/completions", grammar=GBNF, temperature=1, seed=seed, max_tokens=200) for seed in range(4)
    }
    assert all(one == "yes" or set(one) <= set("0123456789ab.") for one in found)


def test_any_object_of_vllm(talker: Serving) -> None:
    body = {"messages": CHAT, "max_tokens": 20, "structured_outputs": {"json_object": True}}
    assert talker.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"think": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": "high"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"effort": "minimal"}}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"max_tokens": 9, "exclude": True}}, {}),
        ({"reasoning": "off"}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": "auto"}, {}),
        (
            {"think": True, "reasoning_effort": "low", "enable_thinking": True},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
        ),
        ({"think": False, "reasoning": "off", "enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": False, "chat_template_kwargs": {"thinking": True}}, {"enable_thinking": False, "thinking": True}),
    ],
    ids=str,
)
def test_reasoning_under_other_names(body: dict[str, Any], values: dict[str, Any]) -> None:
    assert ChatRequest.model_validate({"messages": CHAT, **body}).template_values == values


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 8.0},
        {"seed": 7.0, "top_k": 0.0, "n": 1.0},
        {"stop": ""},
        {"stop": ["", ""]},
        {"stream_options": None},
    ],
    ids=str,
)
def test_parameters_with_the_same_meaning_have_the_same_effect(served: Serving, more: dict[str, Any]) -> None:
    bare, other = (
        served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, "seed": 7, **extra}).json()["choices"]
        for extra in ({}, more)
    )
    assert bare == other


def test_biases_as_pairs(served: Serving) -> None:
    token = served.llm.tokenizer.encode("e", special=False)[0]
    for bias in (100, 100.0, {str(token): 100}, [[token, 100]]):
        given = bias if isinstance(bias, dict | list) else {str(token): bias}
        assert text_of(served, logit_bias=given) == "eeee"
    assert text_of(served, logit_bias=[[token, 100], [token + 1, False]]) == "eeee"


def text_of(it: Serving, **more: Any) -> str:
    made = it.post("/v1/completions", {"prompt": "go", "max_tokens": 4, **more}).json()
    return str(made["choices"][0]["text"])


def test_responses_accept_the_sampling_fields_of_other_servers(served: Serving) -> None:
    body = {"input": "go", "max_output_tokens": 4, "temperature": 2.0, "seed": 3, "top_k": 1.0, "stop": [""]}
    greedy = {"input": "go", "max_output_tokens": 4, "temperature": 0.0}
    first, second = (served.post("/v1/responses", one).json()["output"][0]["content"] for one in (body, greedy))
    assert first == second


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_numbers_and_roles(served: Serving, path: str) -> None:
    body = {"messages": [{"role": "User", "content": "go"}]} if path == "/api/chat" else {"prompt": "go"}
    options = {"num_predict": 4.0, "seed": 1.0, "stop": [""], "num_gqa": 8}
    answer = served.post(path, {"model": "toy", "stream": False, "max_output_tokens": 9, "options": options, **body})
    assert answer.json()["eval_count"] == 4


def test_arguments_as_text_are_read_in_ollamas_api(served: Serving) -> None:
    def size(arguments: Any) -> int:
        call = {"function": {"name": "f", "arguments": arguments}}
        chat = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
        body = {"model": "toy", "messages": chat, "stream": False, "options": {"num_predict": 1}}
        return int(served.post("/api/chat", body).json()["prompt_eval_count"])

    assert size({"a": 1}) == size('{"a": 1}')


def test_the_properties_of_llamacpp(served: Serving) -> None:
    found = served.get("/props").json()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == served.llm.model.target.context_length
    assert settings["params"]["temperature"] == served.llm.sampling().temperature
    assert settings["params"]["dry_sequence_breakers"] == ["\n", ":", '"', "*"]
    assert found["total_slots"] == len(served.get("/slots").json())
    assert found["chat_template"] == served.llm.tokenizer.chat_template
    assert "/" not in found["model_path"]
    assert served.get("/props?model=none").status_code == served.get("/slots?model=none").status_code == 404
    assert served.post("/props", {"chat_template": "x"}).status_code == 405


def test_the_tokenizer_is_described(served: Serving, talker: Serving) -> None:
    found = talker.get("/tokenizer_info").json()
    words: Tokenizer = talker.llm.tokenizer
    assert found["eos_token"] == words.special_tokens["eos_token"]
    assert found["chat_template"] == words.chat_template
    assert found["tokenizer_class"] == "BPE"
    assert served.get("/tokenizer_info?model=other/name").json()["model_max_length"] == 256
    assert served.get("/tokenizer_info?model=none").status_code == 404
