"""Connections without requests are closed, and never block other connections."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from paceline.server import listen
from tests.support.connections import connect, request
from tests.support.running import Serving, serving
from tests.support.slow_llm import ENDLESS, slow_llm
from tests.support.toys import toy_llm

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def closed(connection: socket.socket, sent: bytes = b"", seconds: float = 20) -> bool:
    """Return True if the server soon closes the connection, although `sent` arrives repeatedly."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            connection.sendall(sent)
            if select.select([connection], [], [], 0.05)[0] and not connection.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_HEADER_SECONDS", 0.4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("head", [b"", HEAD], ids=["silent", "cut off"])
def test_a_connection_without_a_request_is_closed(head: bytes) -> None:
    with serving(toy_llm()) as it, connect(it) as client:
        client.sendall(head)
        assert closed(client)


@pytest.mark.usefixtures("impatient")
def test_a_head_that_trickles_in_is_not_waited_for() -> None:
    with serving(toy_llm()) as it, connect(it) as client:
        client.sendall(HEAD + b"X: ")
        assert closed(client, b"x")


@pytest.mark.usefixtures("impatient")
def test_bytes_after_an_answer_are_not_read_forever() -> None:
    """Such bytes, for example of an unwanted body, would delay uvicorn's own timeout for idle connections."""
    with serving(toy_llm(), max_body=1000, max_images=0, max_image_bytes=0) as it, connect(it) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 1000000\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
        assert closed(client, b"x")


@pytest.mark.usefixtures("impatient")
def test_a_reply_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch), connections=9) as it:
        body: Any = {**ENDLESS, "max_tokens": 140}
        stream = it.openai.chat.completions.create(model="toy", extra_body=body, messages=body["messages"], stream=True)
        assert [part.choices[0].finish_reason for part in stream][-1] == "length"
        assert it.get("/health").status_code == 200


def read_after(monkeypatch: pytest.MonkeyPatch, seconds: float, buffer: int | None) -> tuple[int, int]:
    """Return the length of a long answer, and the bytes that a client gets that waits first and then reads slowly."""
    monkeypatch.setattr(listen, "_STALL_SECONDS", 0.4)
    body = json.dumps({"prompt": "a" * 100_000, "with_pieces": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serving(toy_llm()) as it, connect(it, receive=buffer) as client:
        client.sendall(head % len(body) + body)
        begun = client.recv(4096)
        assert begun.startswith(b"HTTP/1.1 200")
        time.sleep(seconds)
        whole = int(begun.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        got = len(begun.partition(b"\r\n\r\n")[2])
        with contextlib.suppress(ConnectionResetError):
            while got < whole and (more := client.recv(200_000)):
                got += len(more)
                time.sleep(0 if buffer else 0.02)  # from a small buffer reading is slow enough
        assert healthy(it)
    return whole, got


def test_an_answer_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, got = read_after(monkeypatch, 0.9, 2048)
    assert got < whole


def test_an_answer_is_sent_completely_to_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, got = read_after(monkeypatch, 0.0, None)
    assert got == whole


def healthy(it: Serving) -> bool:
    return it.get("/health").status_code == 200


def test_idle_connections_make_room_for_others() -> None:
    with serving(toy_llm(), connections=9) as it:
        idle = [connect(it) for _ in range(30)]
        for client in idle[::2]:
            client.sendall(HEAD)
        for _ in range(20):
            assert healthy(it)
        assert sum(closed(client, seconds=1) for client in idle[:22]) == 22
        for client in idle:
            client.close()


def test_a_new_connection_gets_an_error_if_all_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:

    with serving(slow_llm(monkeypatch), connections=3) as it:
        asking = []
        for _ in range(2):
            asking.append(client := connect(it))
            client.sendall(request(json.dumps(ENDLESS).encode()))
            assert client.recv(10).startswith(b"HTTP/1.1")
        assert it.get("/health").status_code == 503
        for client in asking:
            client.close()
        assert it.idle()
        until = time.monotonic() + 20
        while not healthy(it) and time.monotonic() < until:
            time.sleep(0.05)
        assert healthy(it)


OPEN_FILES = [(256, 300, 300, 150), (1024, 3000, 3000, 1024)]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize(("soft", "hard", "after", "most"), [*OPEN_FILES, (5000, 9000, 5000, 1024)])
def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int, most: int
) -> None:
    import resource

    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert listen.max_connections() == most
    assert limits[-1] == (after, hard)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
@pytest.mark.parametrize(("soft", "hard", "after", "most"), OPEN_FILES)
def test_the_system_raises_the_limit_of_open_files(soft: int, hard: int, after: int, most: int) -> None:
    """Run in a separate process, because the hard limit can only be lowered."""
    program = f"""
import resource
from paceline.server.listen import max_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(max_connections(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(most), str(after), str(hard)]
