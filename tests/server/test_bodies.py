"""Malformed bodies are client errors: status 400 in OpenAI's format, never 500, and the server continues."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from paceline.server.apis.chat_completions import ChatRequest
from paceline.server.apis.completions import CompletionRequest
from paceline.server.bodies import parse
from paceline.server.errors import ApiError
from tests.support.described import Document, FuzzRequest
from tests.support.fuzz import BODIES, PATHS, check_response
from tests.support.running import Serving

JSON = {"Content-Type": "application/json"}
UNKNOWN = {f"x{i}": 1 for i in range(50_000)}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 50_000},
        {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(50_000)}},
        {"prompt": [["a"]] * 50_000},
        {"prompt": "a", **UNKNOWN},
        {"prompt": "a", "speculation": UNKNOWN},
        {"prompt": "a", "stream": True, "stream_options": UNKNOWN},
    ],
    ids=lambda body: ",".join(list(body)[:3]),
)
def test_only_the_first_errors_of_a_completion_are_reported(body: dict[str, Any]) -> None:
    """Reporting every place takes time and blocks other requests."""
    few(CompletionRequest, body)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [0] * 50_000},
        {"modalities": ["x"] * 50_000},
        {"response_format": {"type": "json_object", **UNKNOWN}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", **UNKNOWN}}},
        {"chat_template_kwargs": UNKNOWN},
    ],
    ids=",".join,
)
def test_a_chat_wrong_in_many_places_is_told_of_few(more: dict[str, Any]) -> None:
    few(ChatRequest, {"messages": [{"role": "user", "content": "a"}], **more})


def few(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 200


def test_one_of_many_unknown_keys_is_named(served: Serving) -> None:
    for body, param in (
        ({"messages": [{"role": "user", "content": "a"}], **UNKNOWN}, "x0"),
        ({**UNKNOWN, "messages": [{"role": "user", "content": "a"}]}, "x0"),
    ):
        error = served.post("/v1/chat/completions", body).json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param}: unknown parameter")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": ' + b"9" * 100 + b"}",
        b'{"a": ' + b"9" * 100_000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 1}}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b'{"a": 1} x',
    ],
    ids=lambda data: repr(data[:24]),
)
def test_malformed_bodies_are_refused(served: Serving, data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(data)
    assert caught.value.status == 400
    for path in PATHS:
        answer = served.post(path, content=data, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_nested_bodies_with_large_numbers_are_parsed() -> None:
    nested: Any = 1
    for _ in range(90):
        nested = {"a": [nested]} if _ % 2 else nested
    body, _ = parse(json.dumps({"a": nested, "b": "ü\U0001f600", "c": 2**63 - 1}).encode())
    assert body["c"] == 2**63 - 1


def test_values_are_counted() -> None:
    """Tiny objects take thirty times their size in the request."""
    with pytest.raises(ApiError, match="more than 200000 strings, lists and objects"):
        parse(b'{"user": [' + b'{"":0},' * 100_000 + b"0]}")
    _, memory = parse(b'{"user": [' + b'{"":0},' * 50_000 + b"0]}")
    assert memory > 10_000_000
    body, memory = parse(b'{"prompt": [' + b"31," * 1_000_000 + b"0]}")
    assert len(body["prompt"]) == 1_000_001
    assert memory < 64 * 2**20


def test_ignored_parameters_are_not_kept() -> None:
    large = [{"": 0}] * 1000
    calls = [{"index": large, "function": {"name": "f", "arguments": "{}", **UNKNOWN}}]
    content = [{"type": "text", "text": "x", **UNKNOWN}]
    message = {"role": "assistant", "content": content, "parsed": large, "tool_calls": calls, **UNKNOWN}
    tools = [{"type": "function", "function": {"name": "f", **UNKNOWN}, **UNKNOWN}]
    given = {"messages": [message], "tools": tools, "user": large, "metadata": large, "stream": True}
    body = ChatRequest.model_validate({**given, "stream_options": {"include_obfuscation": large}})
    assert body.stream_options
    assert {body.user, body.metadata, body.stream_options.include_obfuscation} == {None}
    assert len(body.model_dump_json(exclude_none=True)) < 1000


KINDS = ["text/plain", "", "application/octet-stream", "application/x-www-form-urlencoded"]
FROM_A_PAGE = [{"Origin": "https://example.org"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]


@pytest.mark.parametrize("page", FROM_A_PAGE, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "application/json; charset=utf-16"])
def test_a_web_page_must_declare_json(served: Serving, kind: str, page: dict[str, str]) -> None:
    """A browser sends other content types to another origin without a preflight request."""
    headers = {"Content-Type": kind, **page}
    answer = served.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/api/embed", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_clients_may_declare_any_type(served: Serving, kind: str, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    body = {"/tokenize": {"prompt": "a"}, "/api/embed": {"input": "a"}}.get(path, chat)
    assert served.post(path, content=json.dumps(body), headers={"Content-Type": kind}).status_code == 200


def test_the_charset_may_be_declared(served: Serving) -> None:
    kind = {"Content-Type": 'Application/JSON; charset="UTF-8"', "Origin": "https://example.org"}
    assert served.post("/tokenize", content=b'{"prompt": "a"}', headers=kind).status_code == 200


@pytest.mark.slow
@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    st.sampled_from([*PATHS, *PATHS[:2] * 4]).flatmap(lambda path: st.tuples(st.just(path), BODIES[path]))
)
def test_bodies_made_by_hypothesis(served: Serving, case: tuple[str, bytes]) -> None:
    path, data = case
    check_response(served.post(path, content=data, headers=JSON))


@pytest.mark.slow
def test_documented_requests_do_not_fail_the_server(served: Serving) -> None:
    """This is a sample of the thousands of requests in test_described_requests.py."""
    requests = Document(served.get("/openapi.json").json()).requests()

    @hypothesis.settings(max_examples=150, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(requests)
    def check(asked: FuzzRequest) -> None:
        asked.check(served)

    check()


def test_the_server_is_whole_afterwards(served: Serving) -> None:
    assert served.idle()
    assert served.post("/v1/completions", {"prompt": "hello"}).status_code == 200
