"""Schemas in requests: enforced strictly if the client asks for it, and otherwise as a guide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running import Serving, serving
from tests.support.scripted import scripted

pytest.importorskip("llguidance")

CHAT = [{"role": "user", "content": "go"}]
SET = {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 3, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"a": SET}, "required": ["a"]}
TEXT = '{"a": ["x"]}'


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(scripted(TEXT[:-1] + ', "b": 1}')) as it:
        yield it


def chat(schema: Any, **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
    return {"messages": CHAT, "max_tokens": 200, "response_format": form}


@pytest.mark.parametrize("more", [{}, {"strict": False}, {"strict": None}])
def test_a_format_is_a_guide_by_default(served: Serving, more: Any) -> None:
    """The set is treated as a list, and the object is closed, although the model would add a key."""
    made = served.post("/v1/chat/completions", chat(SCHEMA, **more)).json()
    assert made["choices"][0]["message"]["content"] == TEXT


def test_a_strict_format_is_a_promise(served: Serving) -> None:
    refused = served.post("/v1/chat/completions", chat(SCHEMA, strict=True))
    assert refused.status_code == 400
    assert "uniqueItems cannot be enforced" in refused.json()["error"]["message"]
    lenient = {**SCHEMA, "x-guidance": {"lenient": True}}
    assert served.post("/v1/chat/completions", chat(lenient, strict=True)).status_code == 200
    assert served.post("/v1/chat/completions", {"messages": CHAT, "guided_json": SCHEMA}).status_code == 400
    body = {"prompt": "go", "max_tokens": 200, "guided_json": lenient}
    assert served.post("/v1/completions", body).status_code == 200


def test_other_apis_have_guides(served: Serving) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    bodies = {
        "/v1/responses": {"input": "go", "max_output_tokens": 200, "text": {"format": form}},
        "/v1/messages": {
            "messages": CHAT,
            "max_tokens": 200,
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
        "/api/chat": {"messages": CHAT, "format": SCHEMA, "stream": False},
        "/api/generate": {"prompt": "go", "format": SCHEMA, "stream": False},
    }
    for path, body in bodies.items():
        answer = served.post(path, {"model": "toy", **body})
        assert answer.status_code == 200, (path, answer.text)
    raw = {"model": "toy", "prompt": "go", "raw": True, "format": SCHEMA, "stream": False}
    assert served.post("/api/generate", raw).status_code == 200
    strict = {**bodies["/v1/responses"], "text": {"format": {**form, "strict": True}}}
    assert served.post("/v1/responses", {"model": "toy", **strict}).status_code == 400


def test_errors_in_a_schema_name_the_field_that_the_client_sent(served: Serving) -> None:
    bad = {"type": "nonsense"}
    form = {"type": "json_schema", "schema": bad}
    messages = {"messages": CHAT, "max_tokens": 200}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages", {**messages, "output_format": form}, "output_format"),
        ("/v1/messages", {**messages, "output_config": {"format": form}}, "output_config.format"),
        ("/v1/responses", {"input": "go", "text": {"format": {**form, "name": "x"}}}, "text.format"),
        ("/v1/chat/completions", chat(bad), "response_format"),
    ]
    for path, body, param in cases:
        answer = served.post(path, {"model": "toy", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        assert error["message"].startswith(f"{param}: ")
    for path, body in (("/api/chat", {"messages": CHAT}), ("/api/generate", {"prompt": "go"})):
        answer = served.post(path, {"model": "toy", "stream": False, "format": bad, **body})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("format: ")


def test_arguments_follow_a_guide_unless_the_function_is_strict(served: Serving) -> None:
    def asked(choice: Any, **more: Any) -> Any:
        tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, **more}}
        return served.post(
            "/v1/chat/completions", {"messages": CHAT, "tools": [tool], "tool_choice": choice, "max_tokens": 200}
        )

    assert asked("required").status_code == asked("required", strict=False).status_code == 200
    refused = asked("required", strict=True)
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]
    assert asked("auto", strict=True).status_code == 200


def test_guides_hold_with_tools_and_after_reasoning(served: Serving) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    assert served.post("/v1/chat/completions", {**chat(SCHEMA), "tools": [tool]}).status_code == 200
    for strict, status in ((False, 200), (True, 400)):
        body = {**chat(SCHEMA, strict=strict), "tools": [tool]}
        assert served.post("/v1/chat/completions", body).status_code == status
