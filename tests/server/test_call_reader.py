# ruff: noqa: RUF001 (DeepSeek's markers)
"""Calls as small models write them: mistakes in JSON, missing arguments, other families' formats, hostile text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat.calls import Call, CallParser, Piece, ReasonedCalls
from paceline.chat.tools import (
    APERTUS,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_V3,
    DSML,
    FORMATS,
    GEMMA,
    GLM,
    GRANITE,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MISTRAL,
    PHI,
    PLAIN,
    QWEN,
    CallFormat,
    call_format_of,
)
from tests.support.counted_lines import counted

fuzz = settings(max_examples=2 * settings.default.max_examples)

FUNCTIONS: Any = {
    "ping": None,
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}
Found = list[tuple[str, Any]]


def read(form: CallFormat, text: str, step: int = 3, **how: Any) -> tuple[str, Found]:
    parser, shown, pieces = CallParser(form, FUNCTIONS, **how), "", list[Piece]()
    for at in range(0, len(text), step):
        more, found = parser.push(text[at : at + step])
        shown, pieces = shown + more, [*pieces, *found]
    more, found = parser.flush()
    return shown + more, [
        (call.name, json.loads(call.arguments)) for call in [*pieces, *found] if isinstance(call, Call)
    ]


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


FORMS: list[tuple[CallFormat, str, Found]] = [
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [("add", {"a": 1}), ("ping", {})],
    ),
    (
        COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>',
        [("add", {"a": 1}), ("ping", {})],
    ),
    (GRANITE, '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    (PHI, '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', [("add", {"a": 1})]),
    (PHI, 'functools[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
    (APERTUS, '<|tools_prefix|>[{"add": {"a": 1}}, {"ping": {}}]<|tools_suffix|>', [("add", {"a": 1}), ("ping", {})]),
    (
        DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
        '<｜DSML｜parameter name="path" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="true">a\nb</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">4</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [("write", {"path": "5", "text": "a\nb"}), ("add", {"a": 4})],
    ),
    (
        DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n{"a": 4}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("add", {"a": 4})],
    ),
    (
        LFM,
        "<|tool_call_start|>[write(path='a', text='it's\n\"new\"'), ping()]<|tool_call_end|>",
        [("write", {"path": "a", "text": 'it\'s\n"new"'}), ("ping", {})],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]ping[CALL_ID]123456789[ARGS]{}',
        [("add", {"a": 1}), ("ping", {})],
    ),
    (LLAMA, '<function=add>{"a": 1}</function>', [("add", {"a": 1})]),
    (LLAMA, "<|python_tag|>add.call(a=1)", [("add", {"a": 1})]),
    (LLAMA, '{"type": "function", "name": "ping"}', [("ping", {})]),
    (LLAMA, '{"name": "ping", "parameters": null}', [("ping", {})]),
    (DEEPSEEK, f"{DEEPSEEK.call[0]}ping{DEEPSEEK.call[1]}{DEEPSEEK.call[2]}", [("ping", {})]),
    (
        DEEPSEEK_V3,
        DEEPSEEK_V3.call[0]
        + "write"
        + DEEPSEEK_V3.call[1]
        + '{"text": "```\n<｜tool▁calls▁end｜>"}'
        + DEEPSEEK_V3.call[2],
        [("write", {"text": "```\n<｜tool▁calls▁end｜>"})],
    ),
    (
        GEMMA,
        '<|tool_call>call:write{text:<|"|>a <tool_call|> "b"\n<|"|>}<tool_call|>',
        [("write", {"text": 'a <tool_call|> "b"\n'})],
    ),
    (
        QWEN,
        "<tool_call>\n<function=write>\n<parameter=text>\nUse </parameter> and </tool_call> here.\n</parameter>\n"
        "</function>\n</tool_call>",
        [("write", {"text": "Use </parameter> and </tool_call> here."})],
    ),
    (QWEN, "<tool_call>\n<function=add>\n<parameter=b>\n[1, 2,]\n</parameter>\n</tool_call>", [("add", {"b": [1, 2]})]),
    (GLM, "<tool_call>ping</tool_call>", [("ping", {})]),
]


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(("form", "text", "calls"), FORMS)
def test_every_familys_form_is_read(form: CallFormat, text: str, calls: Found, step: int) -> None:
    assert read(form, text, step) == ("", calls)
    assert read(form, f"Well.\n{text}", step)[1] == (calls if form.name != "llama" or text[0] == "<" else [])


ADD = [("add", {"a": 1})]
MENDED: list[tuple[str, Found]] = [
    ('{"name": "write", "arguments": {"text": "a\n\tb"}}', [("write", {"text": "a\n\tb"})]),
    ('{"name": "write", "arguments": {"text": "</tool_call>"}}', [("write", {"text": "</tool_call>"})]),
    *((text, [("ping", {})]) for text in ('{"name": "ping"}', '{"name": "ping", "arguments": null}')),
    *((text, [("ping", {})]) for text in ('{"name": "ping", "arguments": ""}', '{"name": "functions.ping"}')),
    *((text, ADD) for text in ('{"name": "add", "arguments": {"a": 1}', '{"name": "add", "arguments": {"a": 1,},}')),
    *((text, ADD) for text in ('{"name": "add", "arguments": {"a": 1}}}', '[{"name": "add", "arguments": {"a": 1}}')),
    *(
        (text, ADD)
        for text in ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "{'name': 'add', 'arguments': {'a': 1}}")
    ),
    ('{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', ADD),
    ('{"name": "add", "arguments": {"a": 1}}\n{"name": "ping"}', [*ADD, ("ping", {})]),
]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(("text", "calls"), MENDED)
def test_clear_mistakes_are_mended(text: str, calls: Found, step: int) -> None:
    assert read(HERMES, tagged(text), step) == ("", calls)
    assert read(QWEN, f"So: {tagged(text)} Done.", step) == ("So: Done.", calls)


@pytest.mark.parametrize(
    "text",
    [
        *('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": 5}', '{"name": "add", "arguments": "x"}'),
        *('{"name": 5, "arguments": {}}', '{"arguments": {}}', "{}", "[]", "add", '{"nobody": {}}'),
        *('{"name": "add", "arguments": {"a": }}', '{"name": "add", "arguments": {"a": 1]}', '{"name": "add" "b": 1}'),
    ],
)
def test_unclear_text_stays_text(text: str) -> None:
    text = tagged(text) if text != "add" else "<tool_call> add it"
    assert read(HERMES, text) == (text, [])


@pytest.mark.parametrize("form", [HERMES, PLAIN, QWEN, MISTRAL, LFM], ids=lambda form: form.name)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_whole_reply_that_is_a_call_object_is_a_call(form: CallFormat, step: int) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    for text in (call, f"\n{call}\n", f"```json\n{call}\n```", f"```\n{call}\n```\n", f"[{call}]", f"{call}{form.end}"):
        assert read(form, text, step) == ("", ADD)
        assert read(form, text, step, bare=False) == (text, []) or form is PLAIN
    for text in (
        *(f"{call} is a call.", f"So: {call}", '{"name": "add"}', '{"name": "nobody", "arguments": {}}'),
        *(
            '{"name": "add", "arguments": {}, "result": 3}',
            '{"a": 1}',
            "[1] is a source",
            "```json\n[1]\n```",
            call[:-2],
        ),
    ):
        assert read(form, text, step) == (text, [])


@pytest.mark.parametrize("step", [1, 1000])
def test_a_code_block_within_prose_is_no_call(step: int) -> None:
    block = '```json\n{"name": "add", "arguments": {"a": 1}}\n```'
    text = f"A call looks like this:\n{block}\nBut do not run it!"
    for form in (PLAIN, HERMES, LLAMA, MISTRAL):
        assert read(form, text, step) == (text, [])
    assert read(PLAIN, f"I add.\n{block}\n", step) == ("I add.", ADD)
    assert read(HERMES, f"I add.\n{block}", step) == (f"I add.\n{block}", [])


def test_json_without_a_call_is_not_held_back() -> None:
    parser = CallParser(HERMES, FUNCTIONS)
    assert parser.push('{"city": ')[0] == '{"city":'
    assert parser.push('"Paris"')[0] == ' "Paris"'


@pytest.mark.parametrize(("form", "text", "calls"), FORMS)
def test_a_reply_that_is_cut_holds_no_other_call(form: CallFormat, text: str, calls: Found) -> None:
    for cut in range(len(text)):
        shown, found = read(form, text[:cut], 1000)
        assert found == calls[: len(found)]
        assert found or shown == text[:cut]


def wrapped(form: CallFormat, arguments: Any) -> str:
    return form.head("write") + json.dumps(arguments, ensure_ascii=False) + form.call[2]


TEXTS = st.lists(
    st.sampled_from(["a", '"', "'", "\\", "\n", "\t", "{", "}", "</tool_call>", "<tool_call>", "```", "é", "]"]),
    max_size=8,
).map("".join)


@fuzz
@given(st.sampled_from(FORMATS), TEXTS, TEXTS, st.integers(1, 9))
def test_any_string_survives_in_every_format(form: CallFormat, path: str, text: str, step: int) -> None:
    arguments = {"path": path, "text": text}
    assert read(form, wrapped(form.forced({"pattern": ""}), arguments), step) == ("", [("write", arguments)])


PIECES = [
    *('"', "'", "\\", "{", "}", "[", "]", ":", ",", " ", "\n", "1", "```json", "</", ">", "=", "(", ")", "name", "add"),
    *('{"name": "add", "arguments": ', '{"a": 1}', "<function=", "<parameter=a>", "</parameter>", "</function>"),
    *sorted({form.start for form in FORMATS} | {form.end for form in FORMATS if form.end}),
]


@fuzz
@given(
    st.sampled_from((*FORMATS, PLAIN)), st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.integers(1, 7)
)
def test_no_call_or_text_is_invented(form: CallFormat, text: str, step: int) -> None:
    """The result does not depend on the pieces of the reply. All text and all names of calls occur in the reply."""
    shown, calls = read(form, text, step)
    assert (shown, calls) == read(form, text, 1000)
    rest = iter(text)
    assert all(mark in rest for mark in shown)
    assert all(name in text for name, _ in calls)
    assert calls or shown == text


def lines_run(form: CallFormat, text: str, step: int) -> int:
    with counted() as lines:
        read(form, text, step)
        return lines()


@pytest.mark.parametrize("form", [PLAIN, QWEN, LFM, DEEPSEEK], ids=lambda form: form.name)
def test_the_work_is_linear_in_the_reply(form: CallFormat) -> None:
    pieces = ['{"name": "add", "arguments": {"a": "', "<parameter=a>1</parameter>", " \n", '["', "</parameter>"]
    for piece in (*(form.start + one for one in pieces), *pieces, form.head("add"), wrapped(form.forced({}), {})):
        for step in (2, 100_000):
            once, twice = (lines_run(form, form.start + piece * count, step) for count in (10, 20))
            assert twice < 2.3 * once + 1000


def test_calls_in_reasoning_count_if_it_never_ends() -> None:
    call = tagged('{"name": "add", "arguments": {"a": 1}}')

    def reason(*texts: str, inside: bool = True, finish: str | None = "eos") -> tuple[str, list[str]]:
        reader, shown = ReasonedCalls(HERMES, FUNCTIONS), ""
        for text in texts:
            shown += reader.push(text, True, None)[0]
        more, calls = reader.push("", inside, finish)
        return shown + more, [call.name for call in calls]

    assert reason("I look.\n", call[:20], call[20:]) == ("I look.", ["add"])
    assert reason("I look.\n", call, " And wait.") == ("I look. And wait.", ["add"])
    assert reason("I look.\n", call, finish="length") == (f"I look.\n{call}", [])
    assert reason("I look.\n", call, inside=False, finish=None) == (f"I look.\n{call}", [])
    assert reason('{"name": "add", "arguments": {}}') == ('{"name": "add", "arguments": {}}', [])
    assert reason("I look. <tool", "_box>") == ("I look. <tool_box>", [])


@pytest.mark.parametrize(
    ("template", "tokens", "wanted", "starts"),
    [
        ("{# List of tools: #}", ("<|tool_call_start|>",), LFM, {"<|tool_call_start|>"}),
        ("{# tools #}", ("<|tool_calls_section_begin|>",), KIMI, {"<|tool_calls_section_begin|>"}),
        ("{# <|tool|> tools <|/tool|> #}", ("<|tool_call|>", "<|/tool_call|>"), PHI, {"<|tool_call|>"}),
        ("{# tools #}", ("<|tool_call|>",), GRANITE, {"<|tool_call|>"}),
        ("{# tools <tool_call> #}", ("<|python_tag|>", "[TOOL_CALLS]"), HERMES, {"<|python_tag|>", "[TOOL_CALLS]"}),
        (None, ("[TOOL_CALLS]",), PLAIN, {"[TOOL_CALLS]", "<tool_call>"}),
        ("{# tools #}", (), PLAIN, {"<tool_call>", "```json"}),
    ],
)
def test_families_are_told_by_their_tokens_too(
    template: str | None, tokens: tuple[str, ...], wanted: CallFormat, starts: set[str]
) -> None:
    found = call_format_of(template, lambda text: text in tokens)
    assert found.name == wanted.name
    assert starts <= {found.start, *(form.start for form in found.also)}
    assert starts <= found.markers
