"""Heartbeat events of silent streams: the official clients accept them, and they add no content."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Want
from tests.support.calling import SCHEMA, THINKS, user
from tests.support.running import Serving, serving
from tests.support.scripted import scripted

FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
PAUSE, HEARTBEAT = 0.12, 0.012


def slowed(llm: LLM) -> LLM:
    """Return the same model with a slow prefill and slow rounds of calls."""
    honest, prompt = llm.model.target.forward, len(llm.tokenizer.encode("go:", special=False))
    call = len(llm.tokenizer.encode("go:" + THINKS.partition('"name"')[0], special=False))

    def forward(rows: Rows, cache: KVCache, want: Want) -> Forward:
        at = int(rows.positions.max())
        time.sleep(PAUSE if at <= prompt else 0.0075 if at > call else 0)
        return honest(rows, cache, want)

    llm.model.target.forward = forward  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module")
def slow() -> Iterator[Serving]:
    with serving(slowed(scripted(THINKS)), heartbeat=HEARTBEAT) as it:
        yield it


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("go")], "tools": [TOOL]},
    "/v1/completions": {"prompt": "go:", "max_tokens": 200},
    "/v1/responses": {"input": "go", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": [user("go")], "max_tokens": 300, "tools": [{"name": "add", "input_schema": SCHEMA}]},
    "/api/chat": {"model": "toy", "messages": [user("go")], "tools": [TOOL]},
    "/api/generate": {"model": "toy", "prompt": "go"},
}


def objects(slow: Serving, path: str) -> list[dict[str, Any]]:
    """Return the objects of a stream."""
    lines = slow.post(path, {**BODIES[path], "stream": True}).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def silent(said: dict[str, Any]) -> bool:
    """Return True if an object of a stream has no content."""
    if "choices" in said:
        (choice,) = said["choices"]
        return choice["finish_reason"] is None and not choice.get("text") and not choice.get("delta")
    if "type" in said:
        return said["type"] in ("ping", "response.in_progress") or said.get("delta") == ""
    message = said.get("message", said)
    return not any([said["done"], *(message.get(key) for key in ("content", "response", "thinking", "tool_calls"))])


@pytest.mark.parametrize("path", BODIES)
def test_no_stream_is_silent_for_long(slow: Serving, path: str) -> None:
    """This includes the time before the first token, and during a call, which is sent only when it is complete."""
    said = [silent(each) for each in objects(slow, path)]
    first = said.index(True)
    text = said.index(False, first)
    assert first <= 2, "after what begins the stream"
    assert text - first >= PAUSE / HEARTBEAT / 3
    if path not in ("/v1/completions", "/api/generate"):  # which show the call as it is written
        assert said[text:].count(True) >= 4


def test_chats(slow: Serving) -> None:
    with slow.openai.chat.completions.stream(model="toy", messages=[user("go")], tools=[TOOL]) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    deltas = [event.chunk.choices[0].delta.to_dict() for event in events if event.type == "chunk"]
    assert deltas.count({}) > 8  # one has the finish reason
    assert (message.content, len(message.tool_calls or ())) == ("It is:", 1)
    assert "".join(event.delta for event in events if event.type == "content.delta") == "It is:"
    silent = [i for i, delta in enumerate(deltas) if delta == {}]
    assert silent[0] == 1, "after the role"
    assert silent[-3] > next(i for i, delta in enumerate(deltas) if delta.get("content")), "while the call is written"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_tell_the_progress_of_a_prompt_if_asked(slow: Serving, path: str) -> None:
    lines = slow.post(path, {**BODIES[path], "stream": True, "return_progress": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    first = next(i for i, chunk in enumerate(chunks) if not silent(chunk) and "role" not in str(chunk["choices"]))
    assert len(told) > 1
    assert all("prompt_progress" not in chunk for chunk in chunks[first:])
    total = slow.post(path, BODIES[path]).json()["usage"]["prompt_tokens"]
    assert all(one["total"] == total and 0 <= one["cache"] <= one["processed"] <= total for one in told)
    assert told[0]["time_ms"] < told[-1]["time_ms"]
    assert "prompt_progress" not in slow.post(path, {**BODIES[path], "stream": True}).text


def test_several_choices_and_usage(slow: Serving) -> None:
    options: Any = {"n": 2, "stream_options": {"include_usage": True}}
    made = slow.openai.chat.completions.create(model="toy", messages=[user("go")], stream=True, **options)
    over: set[int] = set()
    for chunk in made:
        for choice in chunk.choices:
            assert choice.index not in over
            over |= {choice.index} if choice.finish_reason else set()
    assert over == {0, 1}
    assert chunk.usage is not None


def test_completions(slow: Serving) -> None:
    asked: Any = {"model": "toy", "prompt": "go:", "max_tokens": 200}
    pieces = [chunk.choices[0].text for chunk in slow.openai.completions.create(stream=True, **asked)]
    assert pieces.count("") > 1
    assert "".join(pieces) == slow.openai.completions.create(**asked).choices[0].text


def test_responses(slow: Serving) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    with slow.openai.responses.stream(model="toy", input="go", tools=tools) as stream:
        events = list(stream)
        made = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    first = kinds.index("response.output_item.added")
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3]
    assert "response.in_progress" not in kinds[first:], "some clients would take it for the whole output so far"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas.count("") > 2
    assert "".join(deltas) == made.output_text == "It is:"
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]


def test_messages(slow: Serving) -> None:
    body = BODIES["/v1/messages"]
    text = slow.post("/v1/messages", {**body, "stream": True}).text
    assert text.count('event: ping\ndata: {"type":"ping"}\n\n') > 8


@pytest.mark.slow
def test_anthropics_client(slow: Serving) -> None:
    anthropic, body = pytest.importorskip("anthropic"), BODIES["/v1/messages"]
    client = anthropic.Anthropic(base_url=slow.address, api_key="none", max_retries=0)
    with client.messages.stream(model="toy", **body) as stream:
        events = list(stream)
        made = stream.get_final_message()
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
    assert "".join(event.text for event in events if event.type == "text") == made.content[1].text == "It is:"
    assert made.content[2].input == {"a": 7}


@pytest.mark.slow
def test_ollamas_client(slow: Serving) -> None:
    client = pytest.importorskip("ollama").Client(slow.address)
    lines = list(client.chat("toy", [user("go")], tools=[TOOL], stream=True))
    empty = [line for line in lines if not line.done and not line.message.content and not line.message.thinking]
    assert len(empty) > 8
    assert "".join(line.message.content or "" for line in lines) == "It is:"
    assert [call.function.name for line in lines for call in line.message.tool_calls or ()] == ["add"]
    lines = list(client.generate("toy", "go", stream=True))
    assert sum(not line.response and not line.thinking and not line.done for line in lines) > 4
    assert lines[-1].done


def test_a_stream_with_events_gets_no_others() -> None:
    with serving(scripted(THINKS)) as it:
        text = it.post("/v1/messages", {**BODIES["/v1/messages"], "stream": True}).text
        assert "ping" not in text
        lines = it.post("/api/chat", {**BODIES["/api/chat"], "stream": True}).text.splitlines()
    assert all(any(json.loads(line)["message"].values()) or json.loads(line)["done"] for line in lines)
