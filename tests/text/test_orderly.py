"""Chats that a strict template refuses are reordered for it. Other chats are unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidPrompt
from paceline.text.chat_template import render
from paceline.text.orderly import alternative_chats
from tests.support.toys import toy_llm

SHOWN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
ALTERNATES = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
TEMPLATES = {
    # As in Qwen3.5's.
    "late system": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}",
    # As in Gemma 1's and 2's.
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    f"{{% for m in messages %}}{ALTERNATES}{{% endfor %}}",
    # As in Mistral's of 2024: a system message may begin, calls and their results do not count.
    "mistral": "{% for m in messages if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    f"{ALTERNATES}{{% endfor %}}",
    # As in Qwen3.5's: somebody must have asked.
    "a user": "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}"
    "{% endif %}",
}
CALLS = [{"function": {"name": "f", "arguments": {}}}]


def chat(text: str) -> list[dict[str, Any]]:
    """Return the chat "s:a u:b", with a call in the assistant's message "c:"."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}
    found = []
    for part in text.split():
        kind, _, content = part.partition(":")
        found.append({"role": roles[kind], "content": content, **({"tool_calls": CALLS} if kind == "c" else {})})
    return found


@pytest.mark.parametrize(
    ("template", "given", "shown"),
    [
        ("late system", "s:a s:b u:c", "s:a\n\nb|u:c|"),
        ("late system", "u:a s:b u:c", "s:b|u:a\n\nc|"),
        ("late system", "s:a u:b u:c", "s:a|u:b|u:c|"),
        ("no system", "s:a u:b", "u:a\n\nb|"),
        ("no system", "s:a u:b a:c u:d", "u:a\n\nb|a:c|u:d|"),
        ("no system", "s:a", "u:a|"),
        ("no system", "u:a u:b a:c a:d u:e", "u:a\n\nb|a:c\n\nd|u:e|"),
        ("no system", "a:hello u:b", "u:|a:hello|u:b|"),
        ("no system", "s:a a:hello u:b", "u:a|a:hello|u:b|"),
        ("mistral", "u:a u:b", "u:a\n\nb|"),
        ("mistral", "u:a c: t:1 u:b", "u:a|a:|t:1\n\nb|"),
        ("mistral", "u:a c: t:1 t:2 u:b a:c u:d", "u:a|a:|t:1|t:2\n\nb|a:c|u:d|"),
        ("mistral", "u:a c: t:1 a:b u:c", "u:a|a:|t:1|a:b|u:c|"),
        ("a user", "s:a", "u:a|"),
    ],
)
def test_a_chat_that_the_template_refuses_is_put_in_order(template: str, given: str, shown: str) -> None:
    assert render(TEMPLATES[template] + SHOWN, chat(given), {}) == shown


@pytest.mark.parametrize("given", ["s:a s:b u:c u:d", "a:a", "u:a c: t:1 u:b", "u:a c: c: t:1", "s:a"])
def test_a_chat_that_the_template_takes_stays_as_it_is(given: str) -> None:
    assert render(SHOWN, chat(given), {}) == "".join(f"{p.replace('c:', 'a:')}|" for p in given.split())


def test_the_error_is_about_the_messages_as_they_were_sent() -> None:
    refuses = "{{ raise_exception(messages | length | string + ' messages') }}"
    with pytest.raises(InvalidPrompt, match="3 messages"):
        render(refuses, chat("s:a u:b u:c"), {})


def test_every_form_holds_every_text() -> None:
    given = chat("s:1 u:2 u:3 c:4 t:5 u:6 s:7 a:8 a:9")
    found = list(alternative_chats(given))
    assert len(found) == 4
    for form in found:
        texts = "\n\n".join(message["content"] for message in form).split()
        assert sorted(texts) == sorted("123456789")
        assert sum("tool_calls" in message for message in form) == 1


def test_the_library_puts_a_chat_in_order() -> None:
    llm = toy_llm()
    llm.tokenizer.chat_template = TEMPLATES["no system"] + SHOWN
    given = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    assert llm.encode(given) == llm.encode([{"role": "user", "content": "ab\n\ncd"}])
    assert llm.generate(given, max_new_tokens=4).token_ids
