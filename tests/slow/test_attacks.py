"""`paceline serve` under attack: other clients' waits, the process's memory and its end have hard bounds."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]

WAIT = 6.0
"""Seconds that a request for four tokens may take meanwhile; alone it takes some 0.1."""
GROWTH = 800 * 2**20
"""Bytes by which the server and its helper may grow together."""
GRACE = 2
END = 15.0
"""Seconds from SIGTERM to the end of the process."""
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 4, "temperature": 0}


class Server:
    """A served demo model. `prefix`: a command that runs the one behind it."""

    def __init__(self, *prefix: str) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--model", "demo", "--quantize", "int8", "--port", "0"]
        command = [*prefix, *command, "--grace", str(GRACE)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.port = self._port()
        threading.Thread(target=self._read, daemon=True).start()
        self.seconds()

    def _port(self) -> int:
        assert self.process.stderr
        until = time.monotonic() + 300
        while time.monotonic() < until and self.process.poll() is None:
            if select.select([self.process.stderr], [], [], 1)[0]:
                self.lines.append(self.process.stderr.readline())
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", self.lines[-1]):
                    return int(found[1])
        raise AssertionError("".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr
        self.lines.extend(self.process.stderr)

    def send(self, path: str, body: Any) -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def seconds(self, **more: Any) -> float:
        """How long an honest client waits for four tokens."""
        began = time.monotonic()
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=SHORT | more, timeout=120)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began

    def memory(self) -> int:
        server = psutil.Process(self.process.pid)
        return sum(_resident(process) for process in [server, *server.children(recursive=True)])

    def end(self) -> float:
        """Seconds that the process takes to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return time.monotonic() - began


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@pytest.fixture
def server() -> Iterator[Server]:
    it = Server()
    yield it
    it.process.kill()
    it.process.wait(30)


def status(connection: socket.socket) -> int:
    """Of the answer, once it comes."""
    with connection:
        return int(connection.recv(64).split()[1])


def hold_out(server: Server, seconds: float, before: int | None = None, **more: Any) -> None:
    """Asks for four tokens again and again; waits and memory keep to their bounds. `before`: bytes before it."""
    before, until = before or server.memory(), time.monotonic() + seconds
    while time.monotonic() < until:
        assert server.seconds(**more) < WAIT
        assert server.memory() - before < GROWTH
        time.sleep(0.1)


def bombs(count: int, first: int = 10000301) -> list[dict[str, Any]]:
    """Requests of a few bytes whose grammars take minutes and gigabytes to compile."""
    schemas = [{"type": "integer", "multipleOf": first + 2 * n} for n in range(count)]
    return [{"prompt": "a", "max_tokens": 4, "timeout": 2, "guided_json": schema} for schema in schemas]


def test_grammars_that_explode(server: Server) -> None:
    for body in bombs(8):
        with server.send("/v1/completions", body):
            time.sleep(0.1)
    hold_out(server, 15)
    assert server.seconds(guided_regex="[a-z]{3,9}") < 2 * WAIT
    assert server.end() < END
    assert server.process.returncode == 0


def test_grammars_that_explode_and_are_waited_for(server: Server) -> None:
    connections = [server.send("/v1/completions", body) for body in bombs(40)]
    hold_out(server, 10)
    for connection in connections:
        assert status(connection) in (400, 504)


def test_sigterm_in_the_midst_of_them(server: Server) -> None:
    connections = [server.send("/v1/completions", {**body, "timeout": 600}) for body in bombs(40)]
    time.sleep(1)
    assert server.end() < END
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
    """Each holds nearly four megabytes; the small bodies of others are answered."""
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
    assert not [line for line in server.lines if "Traceback" in line]


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
    """The engine asks for their masks between everyone's rounds."""
    body = {**SHORT, **form, "max_tokens": 400, "temperature": 1.5, "n": 12}
    connections = [server.send("/v1/completions", {**body, "seed": seed}) for seed in range(2)]
    hold_out(server, 10)
    for connection in connections:
        assert status(connection) in (200, 400)


def test_many_ends_beside_a_grammar(server: Server) -> None:
    before = server.memory()
    for token in range(3, 17):
        connections = [
            server.send("/v1/completions", {**SHORT, "guided_regex": "[a-z]+", "stop_token_ids": [token, other]})
            for other in range(3, 17, 4)
        ]
        assert [status(connection) for connection in connections] == [200] * len(connections)
    assert server.memory() - before < 200 * 2**20


def test_bodies_that_are_larger_in_memory(server: Server) -> None:
    """Tiny objects, in a field that is ignored and in one that is kept: up to thirty times the bytes that were sent."""
    ignored = {**SHORT, "user": [{"": 0}] * 400_000}
    kept = {**SHORT, "guided_json": {"enum": [{"": 0}] * 99_000}}
    before = server.memory()
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


def test_stalled_bodies_beside_honest_ones(server: Server) -> None:
    """Each of them lacks its last bytes; honest large requests are read all the same."""
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
    """A server that may open 512 files."""
    it = Server("sh", "-c", 'ulimit -n 512; exec "$@"', "sh")
    yield it
    it.process.kill()
    it.process.wait(30)


def test_silent_connections(narrow: Server) -> None:
    """More than there may be files; some send half of a request's head, some half of a body."""
    starts = (b"", b"GET /health HTTP/1.1\r\nHost: x", b"POST /tokenize HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    silent = []
    for n in range(900):
        silent.append(socket.create_connection(("127.0.0.1", narrow.port), timeout=60))
        silent[-1].sendall(starts[n % len(starts)])
    hold_out(narrow, 5)
    for connection in silent:
        connection.close()
    assert not [line for line in narrow.lines if "Traceback" in line or "Too many" in line]


def test_sigterm_during_a_body(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_000_000)
        time.sleep(0.5)
        assert server.end() < END
        assert connection.recv(64).startswith(b"HTTP/1.1 503")
    assert server.process.returncode == 0
    assert not [line for line in server.lines if "Traceback" in line]
