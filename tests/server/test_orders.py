"""Every API puts a chat into the order that a strict template requires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running import Serving, serving
from tests.support.toys import toy_llm

ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.fixture(scope="module")
def strict() -> Iterator[Serving]:
    llm = toy_llm(context_length=1024)
    llm.tokenizer.chat_template = ALTERNATES
    with serving(llm) as it:
        yield it


def prompt_tokens(it: Serving, path: str, body: dict[str, Any]) -> int:
    answer = it.post(path, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found.get("usage", found)
    return int(next(usage[key] for key in ("prompt_tokens", "input_tokens", "prompt_eval_count") if key in usage))


def test_instructions_and_neighbours_on_every_api(strict: Serving) -> None:
    size = len("<user>be brief\n\na\n\nb")
    chat = [{"role": "system", "content": "be brief"}, *ASKED]
    assert prompt_tokens(strict, "/v1/chat/completions", {"messages": chat, "max_tokens": 1}) == size
    assert prompt_tokens(strict, "/v1/responses", {"input": chat, "max_output_tokens": 1}) == size
    options = {"num_predict": 1}
    assert (
        prompt_tokens(strict, "/api/chat", {"messages": chat, "stream": False, "options": options, "model": "toy"})
        == size
    )
    message = {"system": "be brief", "messages": ASKED}
    assert prompt_tokens(strict, "/v1/messages", {**message, "max_tokens": 1}) == size
    assert prompt_tokens(strict, "/v1/messages/count_tokens", message) == size
    prompt = strict.post("/apply-template", {"messages": chat}).json()["prompt"]
    assert prompt == "<user>be brief\n\na\n\nb"
    assert strict.post("/tokenize", {"messages": chat}).json()["count"] == size


def test_tools_are_described_to_a_template_without_system_messages(strict: Serving) -> None:
    body = {"messages": ASKED, "tools": [{"type": "function", "function": WEATHER}]}
    prompt = strict.post("/apply-template", body).json()["prompt"]
    assert prompt.startswith("<user>You can call these functions")
    assert prompt.endswith("a\n\nb")


def test_results_and_text_are_one_turn(strict: Serving) -> None:
    """Claude Code sends the user's words and the results of tools together, also where no tools are offered."""
    call = {"type": "tool_use", "id": "x1", "name": "weather", "input": {"city": "rome"}}
    result = {"type": "tool_result", "tool_use_id": "x1", "content": "sunny"}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now"}]},
    ]
    sizes = [
        prompt_tokens(strict, "/v1/messages", {"messages": chat, "max_tokens": 1, **more})
        for more in ({}, {"tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}]})
    ]
    assert sizes[0] < sizes[1]


def test_a_chat_that_no_order_helps_is_refused_as_it_was_sent(strict: Serving) -> None:
    strict.llm.tokenizer.chat_template = "{{ raise_exception('never') }}"
    try:
        error = strict.post("/v1/chat/completions", {"messages": ASKED}).json()["error"]
    finally:
        strict.llm.tokenizer.chat_template = ALTERNATES
    assert error["param"] == "messages"
    assert "never" in error["message"]
