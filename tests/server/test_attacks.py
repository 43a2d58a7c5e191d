"""`paceline serve` under attack: limits on other clients' waits, on memory and on the time of a shutdown."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server_process import ServerProcess, paceline_serve

pytestmark = [pytest.mark.slow, pytest.mark.model]

WORK = 8.0
"""Maximum CPU seconds that the server spends, during an attack, until it answers a request for four tokens. Without an
attack, it spends about 0.1. Other programs on the machine make the wait longer, but not the work."""
GROWTH = 800 * 2**20
"""Maximum total memory growth of the server and its helper process, in bytes."""
GRACE = 2
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 4, "temperature": 0}


class Server(ServerProcess):
    """A served demo model. `prefix` is a command that runs the server's command."""

    def __init__(self, *prefix: str) -> None:
        command = paceline_serve(f"--model demo --quantize int8 --grace {GRACE}")
        super().__init__("paceline serve", [*prefix, *command], patience=300)
        self.work()

    def send(self, path: str, body: Any) -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def work(self, **more: Any) -> float:
        """Return the server's CPU seconds from a well-behaved client's request for four tokens to its answer."""
        before = self.processor_seconds
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=SHORT | more, timeout=120)
        assert answer.status_code == 200, answer.text
        return self.processor_seconds - before

    def end(self) -> None:
        """Send SIGTERM and wait for the process to end. It must not wait for requests of ten minutes."""
        self.terminate()
        self.process.wait(60)


@pytest.fixture
def server() -> Iterator[Server]:
    it = Server()
    yield it
    it.kill()


def status(connection: socket.socket) -> int:
    """Return the status of the response."""
    with connection:
        return int(connection.recv(64).split()[1])


def hold_out(server: Server, seconds: float, before: int | None = None, **more: Any) -> None:
    """Repeatedly request four tokens, and check work and memory. `before` is the memory before the attack."""
    before, until = before or server.resident, time.monotonic() + seconds
    while time.monotonic() < until:
        assert server.work(**more) < WORK
        assert server.resident - before < GROWTH
        time.sleep(0.1)


def bombs(count: int, first: int = 10000301) -> list[dict[str, Any]]:
    """Return small requests with grammars that take minutes and gigabytes to compile."""
    schemas = [{"type": "integer", "multipleOf": first + 2 * n} for n in range(count)]
    return [{"prompt": "a", "max_tokens": 4, "timeout": 2, "guided_json": schema} for schema in schemas]


def test_grammars_that_explode(server: Server) -> None:
    for body in bombs(8):
        with server.send("/v1/completions", body):
            time.sleep(0.1)
    hold_out(server, 15)
    assert server.work(guided_regex="[a-z]{3,9}") < 2 * WORK
    server.end()
    assert server.process.returncode == 0


def test_grammars_that_explode_and_are_waited_for(server: Server) -> None:
    connections = [server.send("/v1/completions", body) for body in bombs(40)]
    hold_out(server, 10)
    for connection in connections:
        assert status(connection) in (400, 504)


def test_sigterm_in_the_midst_of_them(server: Server) -> None:
    connections = [server.send("/v1/completions", {**body, "timeout": 600}) for body in bombs(40)]
    time.sleep(1)
    server.end()
    for connection in connections:
        connection.close()


def test_prompts_of_megabytes(server: Server) -> None:
    for body in ({"prompt": "hello world " * 160_000}, {"messages": [{"role": "user", "content": "a" * 1_900_000}]}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        connections = [server.send(path, body) for _ in range(12)]
        hold_out(server, 5)
        for connection in connections:
            assert status(connection) == 400


def test_long_texts_to_tokenise(server: Server) -> None:
    connections = [server.send("/tokenize", {"prompt": os.urandom(900_000).hex()}) for _ in range(12)]
    long = {"user": "x" * 70_000, "prompt": "hello world " * 1000}
    hold_out(server, 8, **long)
    assert status(connections[0]) == 200
    for connection in connections:
        connection.close()


def test_bodies_that_never_end(server: Server) -> None:
    """Each body has nearly four megabytes, but other clients' small requests are answered."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 4000000\r\n\r\n"
    connections = []
    for _ in range(60):
        connections.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        connections[-1].sendall(head)
        try:
            connections[-1].sendall(b" " * 3_900_000)
        except OSError:
            continue  # refused, as it should be
    hold_out(server, 5)
    for connection in connections:
        connection.close()
    time.sleep(1)
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    "form",
    [
        {"guided_grammar": "start: s\ns: /[a-z ]/ | s s | s s s\n"},
        {"guided_grammar": "start: a\na: b a c | b c |\nb: /[a-z]/ | a b\nc: /[a-z]/ | c a\n"},
        {"guided_regex": "(?s:.)*[aeiou](?s:.){60}x"},
        {"guided_regex": "(?s:.)*a(?s:.){18}x"},
    ],
)
def test_grammars_that_are_slow_to_follow(server: Server, form: dict[str, str]) -> None:
    """The engine computes their masks between the rounds of all requests."""
    body = {**SHORT, **form, "max_tokens": 400, "temperature": 1.5, "n": 12}
    connections = [server.send("/v1/completions", {**body, "seed": seed}) for seed in range(2)]
    hold_out(server, 10)
    for connection in connections:
        assert status(connection) in (200, 400)


def test_many_end_tokens_with_a_grammar(server: Server) -> None:
    before = server.resident
    for token in range(3, 17):
        connections = [
            server.send("/v1/completions", {**SHORT, "guided_regex": "[a-z]+", "stop_token_ids": [token, other]})
            for other in range(3, 17, 4)
        ]
        assert [status(connection) for connection in connections] == [200] * len(connections)
    assert server.resident - before < 200 * 2**20


def test_bodies_that_grow_in_memory_are_bounded(server: Server) -> None:
    """Tiny objects, in an ignored field and in a stored field, take up to thirty times the bytes that were sent."""
    ignored = {**SHORT, "user": [{"": 0}] * 400_000}
    kept = {**SHORT, "guided_json": {"enum": [{"": 0}] * 99_000}}
    before = server.resident
    for body in (ignored, kept):
        connections = [server.send("/v1/completions", body) for _ in range(60)]
        hold_out(server, 5, before)
        for connection in connections:
            connection.close()


def test_a_body_of_unknown_keys(server: Server) -> None:
    unknown = {f"x{n}": 0 for n in range(190_000)}
    for body in ({**SHORT, **unknown}, {**SHORT, "speculation": unknown}, {**SHORT, "logit_bias": unknown}):
        connections = [server.send("/v1/completions", body) for _ in range(6)]
        hold_out(server, 4)
        for connection in connections:
            assert b" 400 " in connection.recv(64)
            connection.close()


def test_stalled_bodies_do_not_delay_complete_bodies(server: Server) -> None:
    """Each stalled body lacks its last bytes, but complete large requests are still read."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    stalled = []
    for _ in range(17):
        stalled.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        stalled[-1].sendall(head + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_940_000)
    for _ in range(10):
        answer = httpx.post(f"http://127.0.0.1:{server.port}/detokenize", json={"tokens": [1000] * 40_000}, timeout=60)
        assert answer.status_code == 200, answer.text
    hold_out(server, 2)
    for connection in stalled:
        connection.close()


@pytest.fixture
def narrow() -> Iterator[Server]:
    """Serve with a limit of 512 open files."""
    it = Server("sh", "-c", 'ulimit -n 512; exec "$@"', "sh")
    yield it
    it.kill()


def test_silent_connections(narrow: Server) -> None:
    """There are more connections than the file limit. Some send half of a request's head, and some half of a body."""
    starts = (b"", b"GET /health HTTP/1.1\r\nHost: x", b"POST /tokenize HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    silent = []
    for n in range(900):
        silent.append(socket.create_connection(("127.0.0.1", narrow.port), timeout=60))
        silent[-1].sendall(starts[n % len(starts)])
    hold_out(narrow, 5)
    for connection in silent:
        connection.close()
    assert not re.search("Traceback|Too many", narrow.log())


def test_sigterm_during_a_body(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_000_000)
        time.sleep(0.5)
        server.end()
        assert connection.recv(64).startswith(b"HTTP/1.1 503")
    assert server.process.returncode == 0
    assert "Traceback" not in server.log()
