"""Chats that are too long: each API's clients recognise the error, and Ollama's API drops the oldest turns."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running import Serving, serving
from tests.support.toys import toy_llm

CONTEXT = 256
LONG = [{"role": "user", "content": "a" * 300}]
OPENAI = "This model's maximum context length is 256 tokens. However, the prompt resulted in 310 tokens"
LITELLM = "this model's maximum context length is"
"""One of the texts that make a ContextWindowExceededError of a provider's error, in any case, in litellm 1.110.2
(litellm_core_utils/exception_mapping_utils.py, ExceptionCheckers). Its providers openai, text-completion-openai,
hosted_vllm, lm_studio, llamafile and anthropic were tried once against this server: each raised that error."""
LITELLM_ANTHROPIC = "prompt is too long"
"""The same of errors of its provider `anthropic`."""


@pytest.fixture(scope="module")
def small() -> Iterator[Serving]:
    with serving(toy_llm(context_length=CONTEXT)) as it:
        yield it


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": LONG}),
        ("completions", {"prompt": "a" * 310}),
        ("responses", {"input": LONG}),
    ],
)
def test_openais_clients_recognise_the_error(small: Serving, path: str, body: dict[str, Any], stream: bool) -> None:
    answer = small.post(f"/v1/{path}", {**body, "stream": stream})
    if (path, stream) == ("responses", True):
        return  # below
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(OPENAI)
    assert LITELLM in error["message"].lower()


def test_a_stream_of_responses_fails_as_codex_expects(small: Serving) -> None:
    """Codex compacts the conversation after a `response.failed` with this code, and not after a status 400."""
    answer = small.post("/v1/responses", {"input": LONG, "stream": True})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert failed["error"]["message"].startswith(OPENAI)
    assert small.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_clients_recognise_the_error(small: Serving, stream: bool) -> None:
    answer = small.post("/v1/messages", {"messages": LONG, "max_tokens": 2, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "prompt is too long: 310 tokens > 256 maximum"
    assert LITELLM_ANTHROPIC in answer.json()["error"]["message"]


def test_a_limit_of_the_server_is_named_as_the_maximum() -> None:
    with serving(toy_llm(), max_prompt=20) as it:
        error = it.post("/v1/messages", {"messages": LONG, "max_tokens": 2}).json()["error"]
        assert error["message"] == "prompt is too long: 310 tokens > 20 maximum"


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def kept(it: Serving, messages: list[dict[str, Any]], **options: Any) -> int:
    """Return the prompt tokens of an Ollama chat."""
    body = {"model": "toy", "messages": messages, "stream": False, "options": {"num_predict": 2, **options}}
    answer = it.post("/api/chat", body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["prompt_eval_count"])


def shown(*messages: dict[str, str]) -> int:
    return len("".join(f"<{one['role']}:{one['content']}>" for one in messages) + "<a:")


def test_ollama_leaves_out_the_oldest_turns(small: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    system, last = turn("system", "be brief"), turn("user", "and now?")
    old = [turn("user", "a" * 70), turn("assistant", "b" * 70), turn("user", "c" * 70), turn("assistant", "ok")]
    assert kept(small, [system, *old, last]) == shown(system, *old[1:], last)
    assert "the oldest 1 of 6 messages are left out" in caplog.text
    assert "be brief" not in caplog.text
    # A longer reply needs more room. Without a limit, a reply gets a quarter of the context.
    assert kept(small, [system, *old, last], num_predict=50) == shown(system, *old[2:], last)
    assert kept(small, [system, *old, last], num_predict=-1) == shown(system, *old[2:], last)


def test_a_chat_that_fits_is_not_shortened(small: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    chat = [turn("user", "a" * 100), turn("assistant", "b" * 100), turn("user", "c")]
    assert kept(small, chat, num_predict=-1) == shown(*chat)
    assert not caplog.records


def test_a_conversation_does_not_begin_with_a_result(small: Serving) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = [turn("user", "a" * 250), called, {"role": "tool", "content": "r" * 20}, turn("user", "b")]
    assert kept(small, chat) == shown(turn("assistant", ""), turn("tool", "r" * 20), turn("user", "b"))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": LONG},
        {"messages": [*LONG, turn("user", "b")], "truncate": False},
        {"messages": [turn("system", "a" * 300), turn("user", "b")]},
    ],
)
def test_a_last_turn_that_is_too_long_is_refused(small: Serving, body: dict[str, Any]) -> None:
    answer = small.post("/api/chat", {"model": "toy", "stream": False, **body})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("the input length exceeds the context length")


def test_a_prompt_that_is_too_long_is_refused(small: Serving) -> None:
    answer = small.post("/api/generate", {"model": "toy", "prompt": "a" * 300, "stream": False})
    assert answer.json()["error"].startswith("the input length exceeds the context length")


def test_responses_leave_out_the_oldest_items_if_asked(small: Serving) -> None:
    items = [turn("user", "a" * 200), turn("assistant", "b" * 50), turn("user", "c")]
    body = {"input": items, "max_output_tokens": 2}
    assert small.post("/v1/responses", body).status_code == 400
    made = small.post("/v1/responses", {**body, "truncation": "auto"}).json()
    assert made["truncation"] == "auto"
    assert made["usage"]["input_tokens"] == shown(*items[1:])
