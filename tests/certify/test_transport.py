"""Endpoints that are slow, endless or hostile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from paceline.certify import transport
from paceline.certify.side import NotOffered, Side
from paceline.certify.transport import EndpointError, Http, parse_json
from paceline.errors import InvalidOption


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve connections with a function. Yield the address of the API."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    answer(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        over.set()
        with suppress(OSError):
            socket.create_connection(listener.getsockname(), 1).close()
        listener.close()
        thread.join(5)


def drip(connection: socket.socket, head: bytes, whole: list[bool]) -> None:
    """Send bytes for a minute. `whole` is set if the client did not close the connection."""
    connection.sendall(head)
    for _ in range(1200):
        time.sleep(0.05)
        connection.sendall(b"x")
    whole.append(True)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
def test_an_answer_that_drips_ends_at_the_time_limit(head: bytes) -> None:
    whole: list[bool] = []
    drips = raw_server(lambda connection: drip(connection, head, whole))
    with drips as base, pytest.raises(EndpointError, match="within"):
        Http(base, seconds=0.3)("GET", "/models")
    assert not whole, "it ended with the server's last byte"


def test_an_endless_answer_is_cut_off() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with raw_server(endless) as base, pytest.raises(EndpointError, match="more than 1000000 bytes"):
        Http(base, seconds=20, most=1_000_000)("GET", "/models")


def test_an_endpoint_that_is_not_there_and_one_that_speaks_something_else() -> None:
    with pytest.raises(EndpointError, match="Is the server running"):
        Http("http://127.0.0.1:9/v1", seconds=2)("GET", "/models")
    with raw_server(lambda connection: connection.sendall(b"SSH-2.0-x\r\n")) as base, pytest.raises(EndpointError):
        Http(base, seconds=2)("GET", "/models")


def test_a_request_is_repeated_if_its_connection_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_RETRY_AFTER", (0.0, 0.0))
    answers = [b"", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
    with raw_server(lambda connection: connection.sendall(answers.pop(0) if answers else b"")) as base:
        assert Http(base, seconds=5)("GET", "/models") == (200, b"{}")
    with raw_server(lambda connection: None) as base, pytest.raises(EndpointError, match="Is the server running"):
        Http(base, seconds=5)("GET", "/models")


@pytest.mark.parametrize("base", ["ftp://host/v1", "file:///etc/passwd", "http://", "http://user:secret@host/v1"])
def test_an_address_is_http_without_a_password(base: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Http(base)
    assert "secret" not in str(caught.value)


def side(data: bytes, status: int = 200) -> Side:
    return Side("plain", lambda method, path, body=None: (status, data))


@pytest.mark.parametrize(
    "answer",
    [b"", b"null", b"[]", b'"x"', b'{"choices": []}', b'{"choices": 3}', b"[" * 100_000, b"1" * 10_000, b"\xff\xfe"],
)
def test_an_answer_without_a_completion_is_an_error(answer: bytes) -> None:
    with pytest.raises(EndpointError):
        side(answer).ask("x")


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": 7, "tool_calls": [3, {"function": []}]}, "logprobs": {"content": [1, {"token": 2}]}},
        {"message": [], "finish_reason": {}, "index": "x", "logprobs": {"tokens": [1], "token_logprobs": "x"}},
        {"text": "fine", "logprobs": {"content": [{"token": "a", "logprob": None, "top_logprobs": [7, {}]}]}},
    ],
)
def test_fields_of_other_types_are_ignored(choice: Any) -> None:
    reply = side(json.dumps({"choices": [choice], "usage": {"completion_tokens": "many"}}).encode()).ask("x")
    assert reply.text in ("", "fine")
    assert reply.tokens is None
    streamed = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n"
    assert side(streamed).ask("x", stream=True).finish == ""


def test_numbers_that_are_not_finite_are_ignored() -> None:
    data = b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": NaN, "prompt_tokens": 1e999}}'
    reply = side(data).ask("x")
    assert (reply.tokens, reply.prompt_tokens) == (None, None)


def test_keys_in_server_messages_are_hidden() -> None:
    body = b'{"error": {"message": "wrong key sk-secret"}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    with raw_server(lambda connection: connection.sendall(head + body)) as base, pytest.raises(NotOffered) as caught:
        Side("plain", Http(base, "sk-secret", 5)).ask("x")
    assert "wrong key KEY" in str(caught.value)
    assert "secret" not in repr(Http(base, "sk-secret"))


def test_text_completions_are_asked_and_read() -> None:
    asked: list[tuple[str, Any]] = []

    def answer(method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        asked.append((path, body))
        logprobs = {
            "tokens": ["a", "b"],
            "token_logprobs": [-0.5, -1],
            "top_logprobs": [{"a": -0.5}, {"b": -1, "c": -2}],
        }
        return 200, json.dumps({"choices": [{"text": "ab", "logprobs": logprobs}]}).encode()

    reply = Side("plain", answer, "m", {"x": 1}, raw=True).ask("say", max_tokens=2, logprobs=True, top_logprobs=2)
    assert asked == [
        ("/completions", {"temperature": 0, "prompt": "say", "max_tokens": 2, "logprobs": 2, "x": 1, "model": "m"})
    ]
    assert [(token.text, token.logprob) for token in reply.scores] == [("a", -0.5), ("b", -1.0)]
    assert reply.scores[1].top == {"b": -1, "c": -2}


def test_refused_fields_are_not_offered_and_other_errors_are_errors() -> None:
    with pytest.raises(NotOffered, match="no such field"):
        side(b'{"error": {"message": "no such field"}}', 400).ask("x")
    with pytest.raises(EndpointError, match="PACELINE_CERTIFY_KEY"):
        side(b"{}", 401).ask("x")
    with pytest.raises(EndpointError, match="not JSON"):
        parse_json(b"<html>")
