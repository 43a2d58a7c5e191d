"""The demo model behind OpenAI's own client: structured output, tools, equality."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.conftest import packaged_model
from tests.support.running import Serving, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

ASK: Any = [{"role": "user", "content": "Name a city in France and how many people live there."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "roll_dice", "parameters": {"type": "object", "properties": {}}}},
]


class City(BaseModel):
    name: Literal["Paris", "Lyon", "Nice"]
    large: bool
    people: int


@pytest.fixture(scope="module")
def demo() -> Iterator[Serving]:
    with packaged_model("demo") as model, serving(LLM(model, {"suffix": Suffix()}), model="demo") as it:
        yield it


def ask(demo: Serving, messages: Any = ASK, **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": 48, **more}
    answer = demo.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_reply_equals_the_library_s_reply(demo: Serving) -> None:
    plain = LLM(demo.llm.model)
    for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 11, "top_p": 0.9}):
        wanted = plain.generate(ASK, plain.sampling(max_new_tokens=48, **how))
        assert ask(demo, **how)["message"]["content"] == wanted.text
        assert ask(demo, **how, speculation="off")["message"]["content"] == wanted.text


def test_any_json(demo: Serving) -> None:
    made = ask(demo, response_format={"type": "json_object"}, max_tokens=200, temperature=0.3, seed=1)
    if made["finish_reason"] == "stop":
        assert isinstance(json.loads(made["message"]["content"]), dict)
    assert made["message"]["content"].startswith("{")


def test_a_schema_through_the_client_s_parser(demo: Serving) -> None:
    made = demo.openai.chat.completions.parse(model="demo", messages=ASK, response_format=City, max_tokens=60)
    parsed = made.choices[0].message.parsed
    assert isinstance(parsed, City)
    with demo.openai.chat.completions.stream(model="demo", messages=ASK, response_format=City, max_tokens=60) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_guided_forms(demo: Serving) -> None:
    said = ask(demo, guided_regex="(Paris|Lyon), [0-9]{2}", temperature=1.0, seed=3)
    assert re.fullmatch("(Paris|Lyon), [0-9]{2}", said["message"]["content"])
    assert said["finish_reason"] == "stop"
    said = ask(demo, guided_grammar='start: "city=" NAME\nNAME: /[A-Z][a-z]{3,5}/')
    assert re.fullmatch("city=[A-Z][a-z]{3,5}", said["message"]["content"])
    said = ask(demo, guided_json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2})
    assert len(json.loads(said["message"]["content"])) == 2
    off = ask(demo, guided_regex="(Paris|Lyon), [0-9]{2}", temperature=1.0, seed=3, speculation="off")
    assert (
        off["message"]["content"]
        == ask(demo, guided_regex="(Paris|Lyon), [0-9]{2}", temperature=1.0, seed=3)["message"]["content"]
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_required_call_is_forced(demo: Serving, named: bool) -> None:
    weather: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice: Any = weather if named else "required"
    how: Any = {"model": "demo", "messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
    made = demo.openai.chat.completions.create(**how).choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    assert made.message.tool_calls is not None
    (call,) = made.message.tool_calls
    if named:
        assert call.function.name == "get_weather"
    given = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(given) == {"city", "unit"}
        assert given["unit"] in ("C", "F")
    deltas = [event.choices[0] for event in demo.openai.chat.completions.create(**how, stream=True)]
    calls = [one for delta in deltas for one in delta.delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in calls) == call.function.arguments
    assert [one.function.name for one in calls if one.function.name] == [call.function.name]
    assert {one.index for one in calls} == {0}
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(delta.delta.content for delta in deltas)
    # The chat continues with the result.
    more = [*ASK, made.message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
    assert ask(demo, [m if isinstance(m, dict) else m.model_dump(exclude_unset=True) for m in more], tools=TOOLS)


def test_tools_are_told_to_the_model(demo: Serving) -> None:
    bare, told, none = (
        demo.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, **more}).json()["usage"]["prompt_tokens"]
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
    )
    assert told > bare == none


def test_tools_with_a_format_give_a_call_or_the_format(demo: Serving) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"sky": "blue"}]}}}
    said = ask(demo, tools=TOOLS, response_format=form, max_tokens=80)["message"]
    assert said["tool_calls"] if said["content"] is None else json.loads(said["content"]) == {"sky": "blue"}


def test_bytes_of_tokens_join_to_the_text(demo: Serving) -> None:
    made = ask(demo, logprobs=True, top_logprobs=2, guided_regex="é🙂 [a-z]{3}")
    spelled = b"".join(bytes(entry["bytes"]) for entry in made["logprobs"]["content"][:-1])
    assert spelled.decode() == made["message"]["content"]
    assert made["logprobs"]["content"][-1]["token"] in ("<|im_end|>", "<|endoftext|>")
