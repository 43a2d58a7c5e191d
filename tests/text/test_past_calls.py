"""Calls of earlier turns: malformed arguments, and the formats that strict templates require."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidPrompt
from paceline.text.chat_template import render
from paceline.text.past_calls import INVALID_ARGUMENTS, alternative_chats, as_object, with_counted_ids


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *(("", {}), (" ", {}), (None, {}), ("null", {}), ("{}", {}), ({}, {})),
        *(({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), ('{"a": "x\ny",}', {"a": "x\ny"})),
        *((text, {INVALID_ARGUMENTS: text}) for text in ('{"city": "Par', "[]", '"ls"', "5", "ls -l", "{" * 5000)),
        *((value, {INVALID_ARGUMENTS: value}) for value in ([1], 5, True)),
    ],
)
def test_arguments_are_always_an_object(given: Any, wanted: Any) -> None:
    assert as_object(given) == wanted


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "arguments": {"é": 1}},
        **({"id": call_id} if call_id else {}),
    }


def result(text: str, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


USER = {"role": "user", "content": "hi"}
CHAT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [call("a", "call_1"), call("b", "call_2")]},
    result("of b", "call_2"),
    result("of a", "call_1"),
    {"role": "assistant", "content": "So."},
]

MARKS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}%s{% endfor %} {% endfor %}"
)
ONE = "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one at a time') }}{% endfor %}"
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def shown(template: str, part: str, chat: Any = CHAT) -> str:
    return render(template + MARKS.replace("%s", part), chat, {})


def test_a_template_for_one_call_gets_a_message_for_each() -> None:
    assert shown(ONE, "[{{ c.function.name }}]") == (
        "user:hi assistant:I look.[a] tool:of a assistant:[b] tool:of b assistant:So. "
    )
    unnamed = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
        result("1"),
        result("2"),
    ]
    assert shown(ONE, "[{{ c.function.name }}]", unnamed) == "user:hi assistant:[a] tool:1 assistant:[b] tool:2 "
    assert shown(ONE, "[{{ c.function.name }}]", unnamed[:-1]) == "user:hi assistant:[a] tool:1 assistant:[b] "


def test_a_template_that_wants_short_ids_gets_them() -> None:
    first = shown(NINE, "<{{ c.id }}>")
    assert first == shown(NINE, "<{{ c.id }}>")
    assert "call_1" not in first
    given = [USER, {"role": "assistant", "content": "", "tool_calls": [call("a", "abcDEF123")]}]
    assert "<abcDEF123>" in shown(NINE, "<{{ c.id }}>", given)
    unnamed = [USER, {"role": "assistant", "content": "", "tool_calls": [call("a")]}, result("1")]
    text = shown(NINE.replace("{% endfor %}{% endfor %}", "{% endfor %}{{ m.tool_call_id }}{% endfor %}"), "", unnamed)
    assert len(text.partition("user")[0]) == 9
    both = shown(ONE + NINE, "<{{ c.id }}>")
    assert both.count("<") == 2
    (ids,) = [
        form
        for form in alternative_chats(CHAT)
        if len(form[1]["tool_calls"]) == 2 and form[1]["tool_calls"][0]["id"] != "call_1"
    ]
    assert {one["tool_call_id"] for one in ids[2:4]} == {one["id"] for one in ids[1]["tool_calls"]}


def test_a_template_that_adds_up_text_gets_arguments_as_text() -> None:
    assert '<a{"é": 1}>' in shown("", "<{{ c.function.name + c.function.arguments }}>")
    assert '<a{"é": 1}>' in shown(ONE, "<{{ c.function.name + c.function.arguments }}>")


def test_a_template_that_takes_the_plain_form_gets_it() -> None:
    assert shown("", "<{{ c.id }}>") == ("user:hi assistant:I look.<call_1><call_2> tool:of b tool:of a assistant:So. ")
    assert not list(alternative_chats([USER]))
    with pytest.raises(InvalidPrompt, match="never"):
        shown("{{ raise_exception('never') }}", "")


def test_kimis_ids_are_counted() -> None:
    again = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call("a", "call_1")]}, result("3", "call_1")]
    numbered = with_counted_ids(again)
    ids = [one["id"] for message in numbered for one in message.get("tool_calls", ())]
    assert ids == ["functions.a:0", "functions.b:1", "functions.a:2"]
    assert [message["tool_call_id"] for message in numbered if message["role"] == "tool"] == [ids[1], ids[0], ids[2]]
