"""Malformed bodies are the client's errors: 400 in OpenAI's shape, never 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.server.bodies import parse
from paceline.server.errors import ApiError
from paceline.server.schema import CompletionRequest
from tests.server.described import Asked, Document
from tests.server.fuzz import BODIES, PATHS, sound
from tests.server.running import Serving

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 50_000},
        {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(50_000)}},
        {"prompt": [["a"]] * 50_000},
    ],
)
def test_a_body_wrong_in_many_places_is_told_of_few(body: dict[str, Any]) -> None:
    """Each place takes time in which nobody else is served."""
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate(body)
    assert refused.value.error_count() < 10


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
def test_what_is_no_body(served: Serving, data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(data)
    assert caught.value.status == 400
    for path in PATHS:
        answer = served.post(path, content=data, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_is_one() -> None:
    nested: Any = 1
    for _ in range(90):
        nested = {"a": [nested]} if _ % 2 else nested
    assert parse(json.dumps({"a": nested, "b": "ü\U0001f600", "c": 2**63 - 1}).encode())["c"] == 2**63 - 1


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
def test_other_content_types(served: Serving, kind: str) -> None:
    answer = served.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


def test_a_charset_may_be_said(served: Serving) -> None:
    kind = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    assert served.post("/tokenize", content=b'{"prompt": "a"}', headers=kind).status_code == 200


@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    st.sampled_from([*PATHS, *PATHS[:2] * 4]).flatmap(lambda path: st.tuples(st.just(path), BODIES[path]))
)
def test_bodies_made_by_hypothesis(served: Serving, case: tuple[str, bytes]) -> None:
    path, data = case
    sound(served.post(path, content=data, headers=JSON))


def test_documented_requests_are_not_the_servers_failure(served: Serving) -> None:
    """A sample of what tests/slow runs by the thousand."""
    requests = Document(served.get("/openapi.json").json()).requests()

    @hypothesis.settings(max_examples=150, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(requests)
    def check(asked: Asked) -> None:
        asked.check(served)

    check()


def test_the_server_is_whole_afterwards(served: Serving) -> None:
    assert served.idle()
    assert served.post("/v1/completions", {"prompt": "hello"}).status_code == 200
