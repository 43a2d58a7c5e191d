# ruff: noqa: RUF001 (DeepSeek's markers)
"""Tool calls in each family's format, read from recorded replies, whole and piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.calls import Call, CallParser
from paceline.chat.tools import (
    DEEPSEEK,
    DEEPSEEK_V3,
    DSML,
    FORMATS,
    GEMMA,
    GLM,
    HERMES,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    PLAIN,
    QWEN,
    SEED,
    CallFormat,
    call_format_of,
    knows_tools,
    with_tools,
)
from paceline.engine.detokenizer import Chunk
from paceline.errors import InvalidPrompt
from paceline.server.apis.chat_completions import ChatChoice
from paceline.server.replies import ChatReply, TokenTexts
from paceline.server.worker import ReplyRound
from paceline.text.chat_template import check_messages, render
from tests.support.toys import toy_tokenizer

LIST: Any = {"type": "array", "items": {"type": "integer"}}
FUNCTIONS: Any = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/any"},
            "b": LIST,
            "note": {"type": "string"},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "unit": {"type": ["string", "null"]},
        },
        "$defs": {"any": {"type": ["integer", "object"]}},
    },
}

# Replies of models: Qwen2.5 and Hermes, Qwen3 with its reasoning, SmolLM2 with a list, Llama 3.1 and 3.2,
# Mistral's older and newer forms.
RECORDED: list[tuple[str, CallFormat, str, str, list[tuple[str, Any]]]] = [
    (
        "qwen2.5",
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    (
        "qwen2.5 with two",
        HERMES,
        'I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>',
        "I will look.",
        [("get_weather", {"city": "Paris"}), ("add", {"a": 1, "b": [2]})],
    ),
    (
        "qwen3",
        HERMES,
        "<think>\nThe user wants weather.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
        "<think>\nThe user wants weather.\n</think>",
        [("get_weather", {"city": "Zürich"})],
    ),
    (
        "smollm2",
        HERMES,
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]</tool_call>',
        "",
        [("add", {"a": 1}), ("add", {"a": 2})],
    ),
    (
        "a fenced call after text",
        PLAIN,
        'I add.\n```json\n{\n  "name": "add",\n  "arguments": {\n    "a": "``` in text"\n  }\n}\n```',
        "I add.",
        [("add", {"a": "``` in text"})],
    ),
    (
        "qwen2.5-coder on one line",
        HERMES,
        '```json {"name": "add", "arguments": {"a": 1}}```',
        "",
        [("add", {"a": 1})],
    ),
    (
        "hermes without an end",
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        "",
        [("add", {"a": 1})],
    ),
    ("llama 3.1", LLAMA, '{"name": "add", "parameters": {"a": "1"}}', "", [("add", {"a": "1"})]),
    ("llama 3.1 marked", LLAMA, '<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", {})]),
    (
        "llama 3.2 with two",
        LLAMA,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "",
        [("add", {"a": 1}), ("get_weather", {"city": "Oslo"})],
    ),
    (
        "mistral v3",
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {"city": "x"}}]',
        "",
        [("add", {"a": 1}), ("get_weather", {"city": "x"})],
    ),
    (
        "mistral v11",
        MISTRAL,
        'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]add{"a": {"b": 1}}',
        "Let me see.",
        [("get_weather", {"city": "x"}), ("add", {"a": {"b": 1}})],
    ),
    (
        "qwen3-coder",
        QWEN,
        "I add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, 3]\n</parameter>\n"
        "<parameter=note>\n 12\n\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=unit>\nnull\n"
        "</parameter>\n</function>\n</tool_call>",
        "I add.",
        [("add", {"a": 1, "b": [2, 3], "note": " 12\n", "exact": True, "unit": None})],
    ),
    (
        "qwen3-coder with two, without line breaks",
        QWEN,
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>\n"
        "<tool_call><function=add></function></tool_call>",
        "",
        [("get_weather", {"city": "Paris"}), ("add", {})],
    ),
    (
        "qwen3-coder without its first marker",
        QWEN,
        "So:\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n</function>\n</tool_call>",
        "So:",
        [("get_weather", {"city": "5"})],
    ),
    (
        "qwen3-coder in hermes' form",
        QWEN,
        '<tool_call>\n{"name": "add", "arguments": {"a": "1"}}\n</tool_call>',
        "",
        [("add", {"a": "1"})],
    ),
    (
        "glm 4.5",
        GLM,
        '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{"b": 1}</arg_value>\n<arg_key>note</arg_key>\n'
        "<arg_value>true\n</arg_value>\n</tool_call>\n<tool_call>get_weather\n</tool_call>",
        "",
        [("add", {"a": {"b": 1}, "note": "true\n"}), ("get_weather", {})],
    ),
    (
        "glm 4.7",
        GLM,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (
        "seed-oss",
        SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (
        "minimax m2",
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">4</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">x</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        [("add", {"a": 4}), ("get_weather", {"city": "x"})],
    ),
    (
        "lfm2",
        LFM,
        "It is so.<|tool_call_start|>[add(a=-1, b=[2], note='it\\'s', exact=True, unit=None), "
        'get_weather(city="a, (b")]<|tool_call_end|>',
        "It is so.",
        [("add", {"a": -1, "b": [2], "note": "it's", "exact": True, "unit": None}), ("get_weather", {"city": "a, (b"})],
    ),
    (
        "lfm2 in json",
        LFM,
        '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>',
        "",
        [("add", {"a": 1})],
    ),
    (
        "gemma 4",
        GEMMA,
        '<|tool_call>call:add{a:{x:<|"|>a "b", c:d<|"|>},b:[1,2],exact:true}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|><|"|>}<tool_call|>',
        "",
        [("add", {"a": {"x": 'a "b", c:d'}, "b": [1, 2], "exact": True}), ("get_weather", {"city": ""})],
    ),
    (
        "deepseek r1",
        DEEPSEEK_V3,
        "Well.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "x"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Well.",
        [("add", {"a": 1}), ("get_weather", {"city": "x"})],
    ),
    (
        "deepseek v3.1",
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [("add", {"a": 1})],
    ),
]

NO_CALLS: list[tuple[CallFormat, str]] = [
    (HERMES, "just text"),
    (HERMES, "a < b and <tool_cal is no tag"),
    (HERMES, "<tool_call>\nnot json\n</tool_call> and more"),
    (HERMES, '<tool_call>{"city": "add"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {'),
    (HERMES, "text that ends in white space \n"),
    (HERMES, 'Look:\n```json\n{"name": "nobody", "arguments": {}}\n```\nIs it not?'),
    (HERMES, "```json\n[1, 2]\n```"),
    (HERMES, "```json\n// a comment, then <tool_call>\n```"),
    (HERMES, '```json\n{"name": "add", "arguments": {'),
    (HERMES, "```python\nadd(1)\n```"),
    (LLAMA, '{"city": "Paris"}'),
    (LLAMA, '{"name": "add", "parameters": {}} and text'),
    (LLAMA, 'text, then {"name": "add", "parameters": {}}'),
    (LLAMA, '<|python_tag|>print("hi")'),
    (MISTRAL, "[TOOL_CALLS] nothing"),
    (QWEN, "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=a>\n1"),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>"),
    (QWEN, "A <function=add> is <b>no</b> call."),
    (GLM, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
    (GLM, "<tool_call>some text</tool_call>"),
    (LFM, "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(a=open('x'))]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>" + "[" * 5000),
    (GEMMA, "<|tool_call>call:add{a:<tool_call|>"),
    (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    (MISTRAL, "[TOOL_CALLS]" + "[" * 5000),
    # White space for which a backtracking pattern would take minutes.
    (MISTRAL, f"[TOOL_CALLS]add{' ' * 50_000}x"),
    (DEEPSEEK, f"{DEEPSEEK.call[0]}add{DEEPSEEK.call[1]}{{{' ' * 50_000}x{DEEPSEEK.end}"),
    # Numbers that are not JSON.
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    (LFM, "<|tool_call_start|>[add(a=-1e999)]<|tool_call_end|>"),
]


def read(family: CallFormat, text: str, step: int, **how: Any) -> tuple[str, list[Call]]:
    reader, shown, calls = CallParser(family, FUNCTIONS, **how), "", []
    for at in range(0, len(text), step):
        piece, found = reader.push(text[at : at + step])
        shown, calls = shown + piece, calls + found
    rest, last = reader.flush()
    return shown + rest, calls + last


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case[0])
def test_recorded_replies(case: Any, step: int) -> None:
    _, family, text, shown, wanted = case
    found_text, calls = read(family, text, step)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == wanted
    assert found_text == shown
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == (9 if family is MISTRAL else 29) for call in calls)


@pytest.mark.parametrize("step", [1, 4, 10_000])
@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_text_without_a_call_stays_text(family: CallFormat, text: str, step: int) -> None:
    assert read(family, text, step) == (text, [])


def test_half_a_character_is_replaced() -> None:
    text, calls = read(HERMES, r'<tool_call>{"name": "add", "arguments": {"a": "\ud800"}}</tool_call>', 5)
    assert (text, calls[0].arguments) == ("", '{"a": "\N{REPLACEMENT CHARACTER}"}')
    shown, calls = read(
        QWEN, "<tool_call>\n<function=add>\n<parameter=a>\n1e999\n</parameter>\n</function>\n</tool_call>", 5
    )
    assert (shown, json.loads(calls[0].arguments, parse_constant=pytest.fail)) == ("", {"a": "1e999"})


def test_text_is_not_held_back_longer_than_it_must() -> None:
    reader = CallParser(HERMES, FUNCTIONS)
    assert reader.push("a <")[0] == "a"
    assert reader.push("b> c")[0] == " <b> c"


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case[0])
def test_one_call_only(case: Any) -> None:
    _, family, text, shown, wanted = case
    for step in (1, 1000):
        found_text, calls = read(family, text, step, single=True)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == wanted[:1]
        assert found_text == shown


def chunk(text: str, token: int, finish: Any = None) -> Chunk:
    return Chunk(text, token, "plain", finish)


@pytest.mark.parametrize("form", [LLAMA, MISTRAL], ids=lambda form: form.name)
def test_a_marker_that_the_text_does_not_show_is_read_by_its_token(form: CallFormat) -> None:
    call = json.dumps({"name": "add", "parameters" if form is LLAMA else "arguments": {}})
    body = call if form is LLAMA else f"[{call}]"
    reply = ChatReply(call_parser=CallParser(form, FUNCTIONS), markers={5: form.start})
    choice = ChatChoice(index=0, token_texts=TokenTexts(toy_tokenizer()), reply=reply)
    assert choice.add_round(ReplyRound(0, [chunk("Hm.", 1), chunk("", 5)], 0, None, 1.0)) == [
        {"index": 0, "delta": {"content": "Hm."}, "logprobs": None, "finish_reason": None}
    ]
    assert choice.add_round(ReplyRound(0, [chunk(body[:5], 2), chunk(body[5:], 3)], 0, None, 1.0)) == []
    called, last = choice.add_round(ReplyRound(0, [chunk("", 36, "eos")], 0, None, 1.0))
    assert called["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert called["finish_reason"] is None
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    whole = choice.as_dict()["message"]
    assert (whole["content"], len(whole["tool_calls"])) == ("Hm.", 1)
    unread = ChatReply(call_parser=CallParser(form, FUNCTIONS))
    unread.add(ReplyRound(0, [chunk("Hm.", 1), chunk("", 5), chunk(body, 2), chunk("", 36, "eos")], 0, None, 1.0))
    assert unread.text == "Hm." + body


# The parts of real templates that distinguish families.
@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ('{%- if tools %}...<tools>...{{- \'<tool_call>\\n{"name": "\' }}{% endif %}', HERMES),
        ("{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{{- '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{- '<|start_header_id|>ipython<|end_header_id|>' }}{{- '<|python_tag|>' }}{% if tools %}", LLAMA),
        ("{{- '<|start_header_id|>' }}{{- 'Environment: ipython' }}{% if custom_tools %}", LLAMA),
        ("{{- '<tool_call>\\n<function=' + tool_call.name + '>' }}{{- '<parameter=' + name + '>' }}", QWEN),
        ("{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>", GLM),
        ("<seed:tool_call><function={{ name }}><parameter={{ key }}>", SEED),
        ("{{ '<|tool_call>call:' }}{{ '<|\"|>' + text + '<|\"|>' }}", GEMMA),
        ("{{ '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json' }}", DEEPSEEK_V3),
        ("{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", DEEPSEEK),
        ("{{ '<｜DSML｜invoke name=' }}", DSML),
        ("{{ messages }}", PLAIN),
        (None, PLAIN),
    ],
)
def test_families_are_told_by_their_templates(template: str | None, wanted: CallFormat) -> None:
    assert call_format_of(template) is wanted


def test_templates_that_know_no_tools_are_told_in_the_system_message() -> None:
    assert not knows_tools("{{ messages }}")
    assert knows_tools("{% if tools %}")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    told = with_tools(chat, [tool])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert json.dumps(tool) in told[0]["content"]
    assert read(HERMES, told[2]["content"], 5)[1][0].arguments == '{"a": 1}'
    assert told[3]["content"] == "<tool_response>\n2\n</tool_response>"
    assert with_tools([{"role": "system", "content": "Be."}, *chat], [tool])[0]["content"].startswith("Be.\n\n")


def test_templates_get_calls_as_they_expect_them() -> None:
    calls = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}|" + calls + "{% endfor %}"
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    text = render(template, [{"role": "assistant", "content": None, "tool_calls": [call]}], {})
    assert text == '|{"name": "add", "arguments": {"a": "é"}}'
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "assistant", "content": None, "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5, "arguments": "{}"}}]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text"}]},
    ],
)
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(InvalidPrompt, match="message 0"):
        check_messages([message])


@pytest.mark.parametrize("marker", [None, 5])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("count", [1, 2])
def test_the_grammar_of_a_forced_call_is_one(form: CallFormat, marker: int | None, count: int) -> None:
    from paceline.sampling.grammar import Grammar

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    special = {form.start: marker} if marker is not None else {}
    grammar = form.grammar([("add", schema), ("get_weather", None)][:count], special)
    assert Grammar.lark(grammar)
    assert Grammar.lark(form.grammar([("add", schema)], special, content={"type": "object"}))
    assert ("<[5]>" in grammar) == (marker is not None and form is not LLAMA)
