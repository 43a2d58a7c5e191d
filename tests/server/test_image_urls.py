"""Images from URLs: named hosts only, within limits, and no private network by accident."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import InvalidPrompt
from paceline.server import image_urls, images
from paceline.server.image_urls import fetch
from tests.support.pictures import encoded, noise
from tests.support.running import serving
from tests.support.toy_vision import ROWS, seeing_llm

PNG = encoded(noise())


class Handler(BaseHTTPRequestHandler):
    """HTTP handler that answers by path."""

    def do_GET(self) -> None:
        where = {
            "/once": "/a.png",
            "/loop": "/loop",
            "/elsewhere": "http://other.example/a.png",
            "/file": "file:///etc/passwd",
            "/bad": "http://[",
        }.get(self.path)
        if where:
            self.send_response(302)
            self.send_header("Location", where)
            self.end_headers()
        elif self.path.startswith("/drip"):
            for _ in range(60):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" if self.path == "/drip100" else b"H")
                self.wfile.flush()
                time.sleep(0.05)
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                for _ in range(30):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
            self.wfile.write(PNG)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_image_is_fetched_from_a_named_host(address: str) -> None:
    for path in ("/a.png", "/once"):
        assert fetch(address + path, ["127.0.0.1"], len(PNG)) == PNG
    part = {"type": "image_url", "image_url": {"url": f"{address}/a.png"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    with serving(seeing_llm(), image_hosts=["127.0.0.1"]) as it:
        assert it.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] > ROWS
        part["image_url"] = {"url": f"{address}/missing"}
        assert "status 404" in it.post("/v1/chat/completions", body).text


@pytest.mark.parametrize(
    ("url", "hosts", "cause"),
    [
        ("/a.png", [], "fetches no images"),
        ("/a.png", ["example.com"], "'127.0.0.1' are not allowed"),
        ("/a.png", ["*"], "only addresses in private networks"),
        ("/a.png", ["127.*"], "only addresses in private networks"),
        ("/elsewhere", ["127.0.0.1"], "'other.example' are not allowed"),
        ("/file", ["127.0.0.1"], "URL is malformed"),
        ("/loop", ["127.0.0.1"], "redirects more than 3 times"),
        ("/missing", ["127.0.0.1"], "status 404"),
        ("/a.png?" + "x" * 10, ["127.0.0.1"], "must not exceed 100 bytes"),
        ("/a b", ["127.0.0.1"], "could not be fetched"),
        ("http://user:word@127.0.0.1/", ["127.0.0.1"], "not allowed"),
        ("http://127.0.0.1:99999/", ["127.0.0.1"], "malformed"),
        ("http:///a.png", ["*"], "malformed"),
        ("http://[", ["*"], "malformed"),
        ("/bad", ["127.0.0.1"], "malformed"),
        ("http://a\0b.example.com/", ["*.example.com"], "was not found"),
        ("https://127.0.0.1:9/", ["127.0.0.1"], "could not be fetched"),
    ],
)
def test_other_urls_are_refused(address: str, url: str, hosts: list[str], cause: str) -> None:
    whole = url if url.startswith("http") else address + url
    with pytest.raises(InvalidPrompt, match=cause) as error:
        fetch(whole, hosts, 100)
    assert error.value.fix


@pytest.mark.parametrize("path", ["/slow", "/drip", "/drip100"])
def test_a_slow_host_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(image_urls, "TOTAL_SECONDS", 0.3)
    with pytest.raises(InvalidPrompt, match=r"within 0\.3 seconds"):
        fetch(address + path, ["127.0.0.1"], 1000, 0.3)


def test_all_images_of_a_request_share_one_time_limit(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = [0.0], list[float]()

    def slow(url: str, hosts: Sequence[str], limit: int, seconds: float) -> bytes:
        given.append(seconds)
        clock[0] += 4
        return fetch(url, hosts, limit, seconds)

    monkeypatch.setattr(image_urls, "fetch", slow)
    monkeypatch.setattr(images, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    parts = [{"type": "image_url", "image_url": {"url": f"{address}/a.png?{i}"}} for i in range(6)]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    with serving(seeing_llm(), image_hosts=["127.0.0.1"]) as it:
        answer = it.post("/v1/chat/completions", body)
    assert given == [10, 6, 2, -2]
    assert answer.status_code == 400
    assert "messages.0.content.3" in answer.text
    assert "did not arrive within 10 seconds" in answer.text


def test_a_path_may_have_any_characters(address: str) -> None:
    assert fetch(f"{address}/\u00e4.png?\u540d=%20", ["127.0.0.1"], len(PNG)) == PNG


def test_only_public_addresses_are_used_for_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def connect(where: tuple[str, int], *_: Any) -> socket.socket:
        asked.append(where[0])
        raise OSError("no network in tests")

    addresses = [
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:100.64.0.1",
        "fec0::1",
        "93.184.216.34",
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (one, 80)) for one in addresses])
    monkeypatch.setattr(socket, "create_connection", connect)
    for hosts in (["*.example.com"], ["img.example.com"]):
        with pytest.raises(InvalidPrompt, match="no network"):
            fetch("http://IMG.example.com/a.png", hosts, 10)
    assert asked == ["93.184.216.34", "10.0.0.1"], "a host that is named literally may be private"
    with pytest.raises(InvalidPrompt, match="no network"):
        fetch("http://*.example.com/a.png", ["*.example.com"], 10)
    assert asked[2:] == ["93.184.216.34"], "a pattern names no host"
