"""Function calls through OpenAI's own client: forced calls, streams, cut calls, and text around calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from paceline.chat.calls import Call, ForcedCallParser
from paceline.chat.tools import DSML, GLM, HERMES, LLAMA, MINIMAX, MISTRAL, QWEN, SEED, CallFormat
from paceline.sampling.grammar import Grammar
from tests.support.grammars import allowed, matcher
from tests.support.running import Serving, serving
from tests.support.scripted import scripted
from tests.support.vocabularies import byte_level

pytest.importorskip("llguidance")

ASK: Any = [{"role": "user", "content": "go"}]


class Closed(BaseModel):
    """A schema without additional properties, as in OpenAI's strict functions."""

    model_config = ConfigDict(extra="forbid")


class Point(Closed):
    x: bool
    y: bool


class Shape(Closed):
    kind: Literal["line", "area"]
    start: Point
    end: Point


class Node(Closed):
    leaf: bool
    below: list[Node] | None


def function(name: str, parameters: Any = None, **more: Any) -> Any:
    given = {"parameters": parameters} if parameters else {}
    return {"type": "function", "function": {"name": name, **given, **more}}


SHAPE, NODE = (function(model.__name__, model.model_json_schema(), strict=True) for model in (Shape, Node))
FLAG = function("flag", {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]})
CLOSED = function("flag", {**FLAG["function"]["parameters"], "additionalProperties": False})
BARE = function("stop")


def ask(served: Serving, **how: Any) -> Any:
    body = {"model": "talker", "messages": ASK, "max_tokens": 200, **how}
    return served.openai.chat.completions.create(**body)


def accepted(grammar: str, text: str) -> bool:
    rows, ids = matcher(Grammar.lark(grammar)), byte_level().encode(text)
    return all(token in allowed(rows, ids[:i]) for i, token in enumerate(ids))


def test_nested_models_can_be_forced_and_are_parsed(talker: Serving) -> None:
    tools = [own_tool(Shape), own_tool(Node)]
    made = talker.openai.chat.completions.parse(
        model="talker", messages=ASK, max_tokens=200, tools=tools, tool_choice=named("Shape")
    )
    (call,) = made.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Shape)
    made = ask(talker, tools=[SHAPE, CLOSED], tool_choice="required")
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.tool_calls[0].function.name in ("Shape", "flag")


def own_tool(model: type[BaseModel]) -> Any:
    """Return a function with arguments that OpenAI's client parses."""
    import openai

    return openai.pydantic_function_tool(model)


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.name)
def test_functions_do_not_share_definitions(form: CallFormat) -> None:
    other = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": {"type": "null"}}}
    grammar = form.grammar(
        [("Shape", SHAPE["function"]["parameters"]), ("Node", NODE["function"]["parameters"]), ("other", other)], {}
    )

    def call(name: str, arguments: Any) -> str:
        return form.head(name) + json.dumps(arguments) + form.call[2]

    point = {"x": True, "y": False}
    assert accepted(grammar, call("Shape", {"kind": "line", "start": point, "end": point}))
    assert accepted(
        grammar, call("Node", {"leaf": True, "below": [{"leaf": False, "below": [{"leaf": True, "below": None}]}]})
    )
    assert accepted(grammar, call("other", {"at": None}))
    assert not accepted(grammar, call("other", {"at": point}))
    assert not accepted(grammar, call("Shape", {"kind": "line", "start": None, "end": point}))


def test_a_function_without_parameters_gets_none(talker: Serving) -> None:
    (call,) = ask(talker, tools=[BARE], tool_choice="required").choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("stop", "{}")


def deltas(events: Any) -> list[Any]:
    return [event.choices[0] for event in events if event.choices]


def test_arguments_of_a_forced_call_are_streamed_as_they_come(talker: Serving) -> None:
    how: Any = {"tools": [SHAPE, CLOSED], "tool_choice": named("Shape"), "speculation": "off"}
    extra = {"extra_body": {"speculation": how.pop("speculation")}}
    (whole,) = ask(talker, **how, **extra).choices[0].message.tool_calls
    _, first, *more, last = deltas(ask(talker, **how, **extra, stream=True))
    (called,) = first.delta.tool_calls
    assert called.id
    assert (called.type, called.function.name, called.function.arguments) == ("function", "Shape", "")
    pieces = [one for choice in more for one in choice.delta.tool_calls]
    assert len(pieces) > 10
    assert all(one.id is None and one.index == 0 and one.function.name is None for one in pieces)
    assert "".join(one.function.arguments for one in pieces) == whole.function.arguments
    assert json.loads(whole.function.arguments)
    assert (last.delta.to_dict(), last.finish_reason) == ({}, "tool_calls")


def test_the_clients_stream_tells_when_arguments_are_done(talker: Serving) -> None:
    with talker.openai.chat.completions.stream(
        model="talker", messages=ASK, max_tokens=200, tools=[own_tool(Shape)], tool_choice="required"
    ) as stream:
        kinds = {event.type: event for event in stream}
        final = stream.get_final_completion()
    done: Any = kinds["tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, Shape)
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == done.parsed_arguments


@pytest.mark.parametrize("length", [1, 3, 8, 12, 20, 30])
def test_a_forced_call_that_is_cut_is_part_of_one(talker: Serving, length: int) -> None:
    how: Any = {"tools": [SHAPE], "tool_choice": "required"}
    (whole,) = ask(talker, **how).choices[0].message.tool_calls
    cut = ask(talker, **how, max_tokens=length).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.content is None
    (call,) = cut.message.tool_calls
    assert call.function.name == "Shape"
    assert whole.function.arguments.startswith(call.function.arguments)
    assert len(call.function.arguments) < len(whole.function.arguments)
    *_, last = deltas(ask(talker, **how, max_tokens=length, stream=True))
    assert (last.delta.to_dict(), last.finish_reason) == ({}, "length")


def test_a_forced_call_that_a_stop_string_cuts_is_no_finished_one(talker: Serving) -> None:
    cut = ask(talker, tools=[SHAPE], tool_choice="required", stop='"start"').choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.tool_calls[0].function.arguments.startswith('{"kind": "')
    assert "start" not in cut.message.tool_calls[0].function.arguments


def read(form: CallFormat, text: str, step: int, names: Any = ("add", "add_all")) -> tuple[list[Call], str]:
    reader = ForcedCallParser(form, dict.fromkeys(names))
    pieces = [piece for at in range(0, len(text), step) for piece in reader.push(text[at : at + step])[1]]
    shown, last = reader.flush()
    pieces += last
    assert shown == ""
    return [p for p in pieces if isinstance(p, Call)], "".join(p for p in pieces if isinstance(p, str))


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", ["{}", '{"a": {"b": [{"c": "}]"}]}}', '{"a": "}\\n</tool_call>"}'])
def test_a_forced_call_cut_anywhere_shows_its_arguments_so_far(form: CallFormat, arguments: str, step: int) -> None:
    head, whole = form.head("add"), form.head("add") + arguments + form.call[2]
    for cut in range(len(whole) + 1):
        calls, said = read(form, whole[:cut], step)
        # The name is known once it is told apart from the other one.
        assert [call.name for call in calls] == (["add"] if cut >= len(head) - len(form.call[1]) + 1 else [])
        assert said == arguments[: max(0, cut - len(head))]
        alone, said = read(form, whole[:cut], step, names=["add"])
        assert [call.name for call in alone] == (["add"] if cut else [])
        assert said == arguments[: max(0, cut - len(head))]


TYPED: Any = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where."},
        "mode": {"$ref": "#/$defs/mode"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "more": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "array", "items": {"$ref": "#/$defs/point"}},
    },
    "required": ["path", "count"],
    "additionalProperties": False,
    "$defs": {"mode": {"enum": ["r", "w"]}, "point": Point.model_json_schema()},
}
VALUES: Any = {"path": "a <b>\n\n", "mode": "w", "count": 7, "more": None, "at": [{"x": True, "y": False}]}


def written(form: CallFormat, values: Any) -> str:
    assert form.tags is not None
    tags, given = form.tags, ""
    for key, value in values.items():
        is_text = isinstance(value, str)
        kind = tags.kind + str(is_text).lower() if tags.kind else ""
        text = value if is_text else json.dumps(value)
        given += tags.before + key + kind + tags.between + text + tags.after
    return form.head("add") + given + form.call[2]


@pytest.mark.parametrize("form", [QWEN, GLM, SEED, MINIMAX, DSML], ids=lambda form: form.name)
def test_a_forced_call_has_the_familys_format(form: CallFormat) -> None:
    grammar = form.grammar([("add", TYPED)], {})
    assert "%json" in grammar
    for values in (VALUES, {"path": "", "count": 0}, {"path": "</", "count": 1, "more": "5 > 4"}):
        text = written(form, values)
        assert accepted(grammar, text)
        for step in (1, 7, 1000):
            reader = ForcedCallParser(form, {"add": TYPED})
            pieces = [piece for at in range(0, len(text), step) for piece in reader.push(text[at : at + step])[1]]
            (call, *more) = [*pieces, *reader.flush()[1]]
            assert isinstance(call, Call)
            assert call.name == "add"
            assert json.loads("".join(map(str, more))) == values
            assert reader.complete
    for values in ({"path": "x"}, {"path": "x", "count": 10}, {"path": "x", "count": "a"}):
        assert not accepted(grammar, written(form, values))
    assert not accepted(grammar, written(form, VALUES | {"mode": "x"}))


def test_a_forced_tagged_call_cut_anywhere_shows_whole_parameters() -> None:
    text, whole = written(QWEN, VALUES), json.dumps(VALUES)
    for cut in range(len(text)):
        reader = ForcedCallParser(QWEN, {"add": TYPED})
        said = [piece for piece in reader.push(text[:cut])[1] if isinstance(piece, str)]
        said += [piece for piece in reader.flush()[1] if isinstance(piece, str)]
        assert not reader.complete
        assert whole.startswith("".join(said))


def test_a_tagged_value_follows_a_reference_with_escaped_names() -> None:
    schema = {
        "type": "object",
        "properties": {"count": {"$ref": "#/$defs/a~1b%20c~0d"}},
        "$defs": {"a/b c~d": {"type": "integer"}},
    }
    reader = ForcedCallParser(QWEN, {"add": schema})
    pieces = [
        *reader.push(f"{QWEN.head('add')}<parameter=count>\n7\n</parameter>\n{QWEN.call[2]}")[1],
        *reader.flush()[1],
    ]
    assert json.loads("".join(piece for piece in pieces if isinstance(piece, str))) == {"count": 7}
    assert not accepted(QWEN.grammar([("add", schema)], {}), written(QWEN, {"count": "seven"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_schemas_that_tags_cannot_enforce_are_forced_as_json(schema: Any) -> None:
    form = QWEN.forced(schema)
    assert (form.start, form.tags) == ("<tool_call>", None)
    assert form.head("add") == HERMES.head("add")
    assert read(form, form.head("add") + '{"a": "x"}' + form.call[2], 3)[1] == '{"a": "x"}'


def test_a_forced_call_of_deepseek_marks_strings_and_json() -> None:
    """V3.2's parameters declare whether they are strings. A pattern is enforced in JSON."""
    schema = {**TYPED, "properties": {**TYPED["properties"], "path": {"type": "string", "pattern": "^x+$"}}}
    grammar = DSML.grammar([("add", schema)], {})
    text = written(DSML, {"path": 0, "count": 1, "more": "null"})
    right, wrong = text.replace('false">0<', 'false">"xx"<'), text.replace('false">0<', 'false">"xy"<')
    assert (accepted(grammar, right), accepted(grammar, wrong)) == (True, False)
    assert not accepted(grammar, written(DSML, {"path": "xx", "count": 1}))
    _, said = read_typed(DSML, schema, right)
    assert json.loads(said) == {"path": "xx", "count": 1, "more": "null"}
    assert DSML.forced({"type": "object"}).tags is None


def read_typed(form: CallFormat, schema: Any, text: str) -> tuple[list[Call], str]:
    reader = ForcedCallParser(form, {"add": schema})
    pieces = [*reader.push(text)[1], *reader.flush()[1]]
    return [p for p in pieces if isinstance(p, Call)], "".join(p for p in pieces if isinstance(p, str))


def test_a_forced_call_of_a_tagged_family() -> None:
    template = "{# tools <tool_call> <function= <parameter= #}go:"
    with serving(scripted(written(QWEN, {"path": "a\nb", "count": 3}), template)) as it:
        made = it.openai.chat.completions.create(
            model="toy", messages=ASK, max_tokens=300, tools=[function("add", TYPED)], tool_choice=named("add")
        )
    (call,) = made.choices[0].message.tool_calls or ()
    assert made.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"path": "a\nb", "count": 3}  # type: ignore[union-attr]


TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@pytest.mark.parametrize("special", [(), ("｜DSML｜",)])  # noqa: RUF001
def test_deepseeks_marker_may_be_a_special_token(special: tuple[str, ...]) -> None:
    """Text cannot end before a special token, so strings are JSON in this case."""
    text = written(DSML, {"path": "a </b>", "count": 5})
    if special:
        text = text.replace('true">a </b>', 'false">"a </b>"')
    body = {"messages": ASK, "tools": [function("add", TYPED)], "tool_choice": "required", "max_tokens": 500}
    with serving(scripted(text, "{# tools ｜DSML｜ #}go:", special)) as it:  # noqa: RUF001
        (call,) = it.post("/v1/chat/completions", body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"path": "a </b>", "count": 5}


@pytest.mark.parametrize("special", [(), TAGS])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tags_may_be_special_tokens(choice: str, special: tuple[str, ...]) -> None:
    text = written(GLM, {"path": "a b", "count": 5})
    body = {"messages": ASK, "tools": [function("add", TYPED)], "tool_choice": choice, "max_tokens": 200}
    with serving(scripted(text, "{# tools <tool_call> <arg_key> <arg_value> #}go:", special)) as it:
        (call,) = it.post("/v1/chat/completions", body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"path": "a b", "count": 5}


FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"answer": 1}]}}}


def bias(text: str) -> dict[str, int]:
    (token,) = byte_level().encode(text)
    return {str(token): 100}


def test_tools_with_a_response_format_give_a_call_or_the_format(talker: Serving) -> None:
    how: Any = {"tools": [SHAPE, CLOSED], "response_format": FORM}
    content = ask(talker, **how, logit_bias=bias("{")).choices[0]
    assert (content.message.content, content.message.tool_calls) == ('{"answer": 1}', None)
    assert content.finish_reason == "stop"
    called = ask(talker, **how, logit_bias=bias("<")).choices[0]
    assert called.message.content is None
    assert len(called.message.tool_calls) == 1
    assert called.finish_reason == "tool_calls"
    forced = ask(talker, **how, tool_choice="required", logit_bias=bias("{")).choices[0]
    assert forced.message.tool_calls
    none = ask(talker, **how, tool_choice="none", logit_bias=bias("<")).choices[0]
    assert none.message.content == '{"answer": 1}'


def test_a_format_with_tools_may_be_any_json(talker: Serving) -> None:
    made = ask(talker, tools=[CLOSED], extra_body={"guided_json": {}}, logit_bias=bias("n"))
    assert made.choices[0].message.content == "null"


def test_a_regular_expression_cannot_be_combined_with_tools(talker: Serving) -> None:
    body = {"messages": ASK, "tools": [CLOSED], "guided_regex": "a"}
    answer = talker.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"


def test_only_allowed_tools_are_called(talker: Serving) -> None:
    def choice(mode: str, *names: str) -> Any:
        tools = [named(name) for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for name in ("Shape", "flag", "stop"):
        made = ask(talker, tools=[SHAPE, CLOSED, BARE], tool_choice=choice("required", name))
        assert made.choices[0].message.tool_calls[0].function.name == name
    auto = ask(talker, tools=[SHAPE], tool_choice=choice("auto", "Shape"), max_tokens=4)
    assert auto.choices[0].message.tool_calls is None
    body = {"messages": ASK, "tools": [SHAPE], "tool_choice": choice("auto", "flag")}
    refused = talker.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "not in tools" in refused.json()["error"]["message"]


def test_former_functions_are_called_in_the_former_shape(talker: Serving) -> None:
    how: Any = {"functions": [CLOSED["function"]], "function_call": {"name": "flag"}}
    choice = ask(talker, **how).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "flag"
    assert set(json.loads(choice.message.function_call.arguments)) == {"on"}
    events = deltas(ask(talker, **how, stream=True))
    calls = [event.delta.function_call for event in events if event.delta.function_call]
    assert [call.name for call in calls if call.name] == ["flag"]
    assert "".join(call.arguments for call in calls) == choice.message.function_call.arguments
    assert events[-1].finish_reason == "function_call"
    told = {"role": "function", "name": "flag", "content": "done"}
    again = [*ASK, choice.message, told]
    assert ask(talker, messages=again, max_tokens=2).choices[0].finish_reason == "length"


def test_results_of_the_clients_helpers_can_be_sent_back(talker: Serving) -> None:
    tools: Any = {"tools": [own_tool(Shape)], "tool_choice": "required"}
    parsed = talker.openai.chat.completions.parse(model="talker", messages=ASK, max_tokens=200, **tools)
    with talker.openai.chat.completions.stream(model="talker", messages=ASK, max_tokens=200, **tools) as stream:
        streamed = stream.get_final_completion()
    for made in (parsed, streamed):
        message = made.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
        for said in (message, message.model_dump(), message.to_dict()):
            assert ask(talker, messages=[*ASK, said, result], max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of its parsed content
def test_parsed_content_and_refusals_can_be_sent_back(talker: Serving) -> None:
    class Answer(BaseModel):
        point: Point

    made = talker.openai.chat.completions.parse(model="talker", messages=ASK, max_tokens=200, response_format=Answer)
    assert isinstance(made.choices[0].message.parsed, Answer)
    more = {"role": "user", "content": "more"}
    assert ask(talker, messages=[*ASK, made.choices[0].message, more], max_tokens=2).choices

    def count(message: Any) -> int:
        answer = talker.post("/tokenize", {"messages": [*ASK, message]})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["count"])

    refused = {"role": "assistant", "content": None, "refusal": "no"}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert count(refused) == count(parts) == count({"role": "assistant", "content": "no"})


def test_a_text_stream_ends_with_an_empty_delta(talker: Serving) -> None:
    for how in ({}, {"logprobs": True}, {"extra_body": {"trace": True}}):
        *events, last = deltas(ask(talker, max_tokens=5, stream=True, **how))
        assert all(event.finish_reason is None for event in events)
        assert (last.delta.to_dict(), last.finish_reason, last.logprobs) == ({}, "length", None)
        assert "".join(event.delta.content or "" for event in events)
    *texts, end = talker.openai.completions.create(model="talker", prompt="go", max_tokens=5, stream=True)
    assert "".join(event.choices[0].text for event in texts)
    assert all(event.choices[0].finish_reason is None for event in texts)
    assert (end.choices[0].text, end.choices[0].finish_reason) == ("", "length")
