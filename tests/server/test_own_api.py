"""The API in docs/how-to/own-api.md works as one file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from paceline.server.app import create_app
from paceline.server.limits import Settings
from paceline.server.models import Models, ModelSource
from paceline.server.worker import Worker
from tests.support.pages import blocks
from tests.support.scripted import scripted

CALL = '{"name": "add", "arguments": {"a": 1}}'
TOOLS = [{"functionDeclarations": [{"name": "add", "parameters": {"type": "object", "properties": {}}}]}]


@pytest.fixture(scope="module")
def client() -> Any:
    """Yield a client of a server with the page's API, with a model that writes text and calls a tool."""
    names: dict[str, Any] = {}
    source, _ = blocks("how-to/own-api.md")
    exec(compile(source, "own-api.md", "exec", dont_inherit=True), names)
    llm = scripted(f"<think>hm</think>So.<tool_call>{CALL}</tool_call>")
    models = Models([ModelSource(("toy",), lambda: Worker(llm), stays=True)])
    with TestClient(create_app(models, Settings(), [names["Gemini"]()])) as client:
        yield client


def asked(verb: str) -> tuple[str, dict[str, Any]]:
    body = {"contents": [{"parts": [{"text": "go"}]}], "tools": TOOLS, "generationConfig": {"maxOutputTokens": 200}}
    return f"/v1beta/models/toy:{verb}", body


def test_a_reply_has_text_and_a_call(client: Any) -> None:
    path, body = asked("generateContent")
    answer = client.post(path, json=body).json()
    [candidate] = answer["candidates"]
    assert candidate["finishReason"] == "STOP"
    assert candidate["content"]["parts"] == [
        {"text": "hm", "thought": True},
        {"text": "So."},
        {"functionCall": {"name": "add", "args": {"a": 1}}},
    ]
    assert answer["usageMetadata"]["candidatesTokenCount"] > 5


def test_a_stream_has_the_same_content_as_a_whole_answer(client: Any) -> None:
    path, body = asked("streamGenerateContent")
    lines = client.post(path, json=body).text.splitlines()
    parts = [
        part
        for line in lines
        if line.startswith("data: ")
        for part in json.loads(line.removeprefix("data: "))["candidates"][0]["content"]["parts"]
    ]
    assert "".join(part["text"] for part in parts if part.get("thought")) == "hm"
    assert "".join(part.get("text", "") for part in parts if not part.get("thought")) == "So."
    assert parts[-1] == {"functionCall": {"name": "add", "args": {"a": 1}}}


def test_errors_name_their_parameter(client: Any) -> None:
    path, body = asked("generateContent")
    assert client.post(path, json={**body, "contents": 5}).json()["error"]["param"] == "contents"
    assert client.post(path.replace("toy", "none"), json=body).status_code == 404
