"""Long answers and long stored conversations do not delay other requests."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.server import api
from paceline.server.apis.stored import ResponseStore, StoredResponse, estimated_bytes
from paceline.server.preprocessing import Preprocessor
from tests.support.calling import SCHEMA, user
from tests.support.running import Serving

LARGE = 200_000
NOTES: Any = [
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * LARGE}]}
]
"""Reasoning without an answer, which is stored but not shown to the model."""
TOOLS: Any = [{"type": "function", "name": "add", "description": "y" * LARGE, "parameters": SCHEMA}]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the pools that prepare requests."""
    used: list[str] = []
    run = Preprocessor.run

    async def noted(self: Preprocessor, pool: Any, *args: Any) -> Any:
        used.append(pool)
        return await run(self, pool, *args)

    monkeypatch.setattr(Preprocessor, "run", noted)
    return used


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the threads that have encoded JSON, and the lengths of the JSON."""
    made: list[tuple[str, int]] = []

    def dumps(*args: Any, **more: Any) -> str:
        text = json.dumps(*args, **more)
        made.append((threading.current_thread().name, len(text)))
        return text

    monkeypatch.setattr(api, "json", SimpleNamespace(dumps=dumps))
    return made


@pytest.mark.parametrize("pieces", [False, True])
def test_many_tokens_are_encoded_a_slice_at_a_time(
    served: Serving, encoded: list[tuple[str, int]], pieces: bool
) -> None:
    text = "abc" * 20_000
    found = served.post("/tokenize", {"prompt": text, "with_pieces": pieces}).json()
    assert found["count"] == len(found["tokens"]) == len(text)
    if pieces:
        assert "".join(token["piece"] for token in found["tokens"]) == text
    assert max(size for _, size in encoded) < 50_000
    for empty in ("", "a"):
        assert served.post("/tokenize", {"prompt": empty}).json()["count"] == len(empty)


def test_stored_responses_are_encoded_off_the_event_loop(served: Serving, pools: list[str]) -> None:
    made = served.post("/v1/responses", {"input": [user("a"), user("b")], "max_output_tokens": 2}).json()
    pools.clear()
    assert served.get(f"/v1/responses/{made['id']}").json() == made
    assert [item["id"] for item in served.get(f"/v1/responses/{made['id']}/input_items").json()["data"]] == [
        f"{made['id']}_1",
        f"{made['id']}_0",
    ]
    assert pools == ["documents", "documents"]
    assert served.get("/v1/responses/none").status_code == 404
    assert served.request("HEAD", f"/v1/responses/{made['id']}").status_code == 200


def test_a_response_is_measured_as_it_grows(
    served: Serving, encoded: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not encoded again to measure its size."""
    kept: list[StoredResponse] = []
    monkeypatch.setattr(ResponseStore, "put", lambda _, response: kept.append(response))
    body = {"input": "go", "tools": TOOLS, "tool_choice": "none", "max_output_tokens": 40, "top_logprobs": 5}
    served.post("/v1/responses", {**body, "stream": True})
    loop = [size for thread, size in encoded if not thread.startswith("paceline") and size > LARGE]
    assert len(loop) == 3, "as it is created, in progress and completed"
    (response,) = kept
    whole = estimated_bytes(json.dumps(response.document)) + estimated_bytes(json.dumps(body))
    assert 0.9 * whole < response.size < 1.2 * whole
    items = len(json.dumps(response.document["output"]))
    assert 0.8 * items < response.length < 1.5 * items


def test_a_small_request_in_a_long_conversation_waits_with_the_long(served: Serving, pools: list[str]) -> None:
    def asked(**more: Any) -> str:
        pools.clear()
        made = served.post("/v1/responses", {"max_output_tokens": 2, **more})
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    short = asked(input="a")
    for _ in range(5):
        short = asked(input="a", previous_response_id=short)
        assert pools == ["short"]
    long = asked(input=[*NOTES, user("a")])
    assert pools == ["parse", "long"]
    long = asked(input="a", previous_response_id=long)
    assert pools == ["long"]
    asked(input="a", previous_response_id=long)
    assert pools == ["long"]
