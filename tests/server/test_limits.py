"""Keys, sizes, queues, ids, origins, and clients that disconnect or stall."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest

from paceline.cli.serve import ServerOptions
from paceline.errors import InvalidOption, OutOfMemory
from paceline.llm import LLM
from paceline.server.errors import ApiError
from paceline.server.limits import Settings, check_host, check_key
from paceline.server.listen import check_address
from paceline.server.models import run_in_thread
from paceline.server.worker import WorkerLimits
from tests.support.connections import connect, request
from tests.support.running import Serving, serving
from tests.support.slow_llm import CHAT, ENDLESS, slow_llm
from tests.support.toys import toy_llm, toy_model

pytestmark = pytest.mark.forks


def began(stream: Any) -> None:
    """Read a stream up to its first text."""
    while not next(stream).choices[0].delta.content:
        pass


def test_keys() -> None:
    with serving(toy_llm(), api_keys=("right", "other")) as it:
        body = {"messages": CHAT, "max_tokens": 2}
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": "Bearer"}):
            for answer in (
                it.post("/v1/chat/completions", body, headers=header),
                it.get("/v1/models", headers=header),
                it.get("/metrics", headers=header),
                it.post("/tokenize", {"prompt": "a"}, headers=header),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("right", "other"):
            answer = it.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert it.get("/health").status_code == 200
        assert it.openai.models.list().data[0].id == "toy"


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_hosts_that_a_server_is_addressed_as(host: str) -> None:
    hosts = ServerOptions().hosts(["127.0.0.1"])
    assert hosts, "without any, every host passes"
    check_host(hosts, host)


@pytest.mark.parametrize("spelling", ["127.0.0.1", "127.1", "2130706433", "127.0.0.2", "LOCALHOST", "::ffff:127.0.0.1"])
def test_hosts_are_checked_on_the_loopback_however_it_is_spelled(spelling: str) -> None:
    options = ServerOptions(host=spelling)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    hosts = options.hosts(check_address(spelling, port))
    for name in (spelling, "localhost"):
        check_host(hosts, f"[{name}]:{port}" if ":" in name else f"{name}:{port}")
    with pytest.raises(ApiError):
        check_host(hosts, f"evil.example:{port}")


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org:8000", "127.0.0.1.example.org", "", "[::1", "a@b"]
)
def test_a_page_cannot_reach_the_loopback_under_its_own_name(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_host(ServerOptions().hosts(["127.0.0.1", "::1"]), host)
    assert caught.value.status == 403


def test_any_host_is_allowed_on_other_interfaces() -> None:
    """This applies to other interfaces, to names for the loopback and another interface, and to servers with keys."""
    for addresses in (["0.0.0.0"], ["::"], ["127.0.0.1", "10.0.0.1"]):
        hosts = ServerOptions(host="localhost").hosts(addresses)
        assert not hosts
        check_host(hosts, "example.org")
    assert not ServerOptions(api_key=["k"]).hosts(["127.0.0.1"])
    check_host(ServerOptions(allowed_host=["Example.org"]).hosts(["127.0.0.1"]), "example.org:443")


def test_only_requests_to_known_hosts_are_answered() -> None:
    with serving(toy_llm(), hosts=["127.0.0.1"]) as it:
        assert it.get("/v1/models").status_code == 200
        for path in ("/v1/models", "/metrics"):
            answer = it.get(path, headers={"Host": "evil.example:8000"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host")
        assert it.get("/health", headers={"Host": "evil.example"}).status_code == 200


def test_a_model_is_loaded_in_a_thread_that_ends() -> None:
    """The thread's pool of OpenMP threads ends with it."""
    thread = run_in_thread(threading.current_thread).result(10)
    assert thread is not threading.current_thread()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(ValueError, match="no number"):
        run_in_thread(lambda: int("no number")).result(10)


def test_a_key_may_be_any_text() -> None:
    check_key(["schlüssel"], "Bearer schlüssel")
    check_key([], "")
    for given in ("", "Bearer ", "Basic schlüssel", "Bearer schlüsse", "Bearer schlüssel2"):
        with pytest.raises(ApiError):
            check_key(["schlüssel"], given)


def test_bodies_that_are_too_large() -> None:
    with serving(toy_llm(), max_body=1000, max_images=0, max_image_bytes=0) as it:
        small = {"messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 2}
        large = {"messages": [{"role": "user", "content": "a" * 1000}], "max_tokens": 2}
        assert it.post("/v1/chat/completions", small).status_code == 200
        answer = it.post("/v1/chat/completions", large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

        def chunked() -> Any:
            for _ in range(100):
                yield b" " * 100

        answer = it.post("/v1/chat/completions", content=chunked(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert it.post("/v1/chat/completions", small).status_code == 200


def test_prompts_that_are_too_long() -> None:
    with serving(toy_llm(), max_prompt=20) as it:
        assert it.post("/v1/completions", {"prompt": "a" * 20}).status_code == 200
        answer = it.post("/v1/completions", {"prompt": "a" * 21})
        assert answer.status_code == 400
        assert "context length is 20 tokens" in answer.json()["error"]["message"]


def test_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch), WorkerLimits(slots=1, queue=1)) as it:
        with it.openai.chat.completions.create(model="toy", extra_body=ENDLESS, messages=CHAT, stream=True) as first:
            began(first)
            with it.openai.chat.completions.create(model="toy", extra_body=ENDLESS, messages=CHAT, stream=True):
                answer = it.post("/v1/chat/completions", {"messages": CHAT})
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
                # n samples are all let in or none
                assert it.post("/v1/chat/completions", {"messages": CHAT, "n": 2}).status_code == 429
                assert it.get("/health").json() == {"status": "ok", "running": 1, "waiting": 1}
        assert it.idle()
        assert it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}).status_code == 200


def test_too_many_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch), max_requests=1) as it:
        with it.openai.chat.completions.create(model="toy", extra_body=ENDLESS, messages=CHAT, stream=True) as first:
            began(first)
            answer = it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        assert it.idle()
        assert it.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}).status_code == 200


def test_a_client_that_leaves_its_stream_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch)) as it:
        stream = it.openai.chat.completions.create(
            model="toy", extra_body={**ENDLESS, "n": 3}, messages=CHAT, stream=True
        )
        began(stream)
        assert it.worker.load.running == 3
        stream.close()
        assert it.idle()
        assert 'vllm:request_success_total{finished_reason="abort",model_name="toy"} 3.0' in it.get("/metrics").text


def test_a_client_that_leaves_before_its_reply_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch)) as it:
        body = json.dumps({**ENDLESS, "stream": False}).encode()
        with connect(it) as client:
            client.sendall(request(body))
            until = time.monotonic() + 20
            while not it.worker.load.running and time.monotonic() < until:
                time.sleep(0.01)
            assert it.worker.load.running == 1
        assert it.idle()


def test_a_client_that_does_not_read_is_given_up() -> None:
    llm = LLM(toy_model(context_length=200_000))
    with serving(llm, stall=0.5) as it, connect(it, receive=2048) as client:
        client.sendall(request(json.dumps({**ENDLESS, "trace": True, "logprobs": True, "n": 4}).encode()))
        assert client.recv(10).startswith(b"HTTP/1.1")
        until = time.monotonic() + 60
        while it.worker.load.running and time.monotonic() < until:
            time.sleep(0.05)
        assert not it.worker.load.running
        assert it.worker.alive


def test_a_timeout_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow_llm(monkeypatch), timeout=30.0) as it:
        answer = it.post("/v1/chat/completions", {**ENDLESS, "stream": False, "timeout": 0.2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        text = it.post("/v1/chat/completions", {**ENDLESS, "timeout": 0.3}).text
        *pieces, last, rest = text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert pieces
        assert rest == ""
        assert it.idle()


def test_a_failed_reply_ends_no_other_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(toy_model())
    with serving(llm) as it:
        good = it.post("/v1/completions", {"prompt": "hello"}).json()["choices"]
        banned = {str(token): -100 for token in range(37)}
        honest = llm.start

        def start(tokens: Any, *args: Any) -> Any:
            if list(tokens) == [1, 2, 3]:
                raise OutOfMemory("no memory for this one", "Ask for less")
            return honest(tokens, *args)

        monkeypatch.setattr(llm, "start", start)
        answer = it.post("/v1/completions", {"prompt": [1, 2, 3]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
        text = it.post("/v1/completions", {"prompt": [1, 2, 3], "stream": True}).text
        assert json.loads(text.removeprefix("data: "))["error"]["type"] == "server_error"
        assert it.post("/v1/completions", {"prompt": "hello", "logit_bias": banned}).status_code == 200
        assert it.post("/v1/completions", {"prompt": "hello"}).json()["choices"] == good


def test_an_unexpected_error_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.worker, "submit", broken)
    answer = served.post("/v1/completions", {"prompt": "hello"}, headers={"x-request-id": "abc-1"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] == "abc-1"
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.getMessage().startswith("abc-1 ")


def test_request_ids(served: Serving) -> None:
    assert served.get("/health", headers={"x-request-id": "my.id_1"}).headers["x-request-id"] == "my.id_1"
    for bad in ("a b", "x" * 129, "a;b", "ü".encode()):
        made = served.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made.isalnum()
        assert len(made) == 32
    assert served.get("/nope").headers["x-request-id"]


def test_logs_name_requests_and_hold_no_prompt(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "paceline"):
        body = {"messages": [{"role": "user", "content": "private words"}], "max_tokens": 2}
        served.post("/v1/chat/completions", body, headers={"x-request-id": "id-7"})
        served.post("/v1/chat/completions", {**body, "temperature": 9}, headers={"x-request-id": "id-8"})
        served.post("/v1/chat/completions?prompt=%0Aforged", body, headers={"x-request-id": "id-9"})
    said = [record.getMessage() for record in caplog.records if record.name == "paceline.server"]
    assert sum(line.startswith("id-7 ") for line in said) == 2
    assert any(line.startswith("id-8 POST /v1/chat/completions 400") for line in said)
    assert "id-8 refused: temperature: Input should be less than or equal to 2" in said
    assert not any("private" in line or "\n" in line for line in said)


def test_the_log_says_why_a_request_was_refused(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is on one line, whatever names a client invents."""
    with caplog.at_level(logging.INFO, "paceline"):
        served.post("/v1/completions", {"prompt": "a", "mirostat": 2}, headers={"x-request-id": "id-1"})
        served.post("/v1/completions", {"prompt": "a", "x\nforged": 2}, headers={"x-request-id": "id-2"})
        served.post("/v1/completions", {"prompt": "a" * 300}, headers={"x-request-id": "id-3"})
    said = "\n".join(record.getMessage() for record in caplog.records if " refused: " in record.getMessage())
    first, second, third = said.splitlines()
    assert first.startswith("id-1 refused: mirostat: not supported by this server. Leave it out, or send 0")
    assert second == "id-2 refused: x forged: unknown parameter"
    assert third.startswith("id-3 refused: This model's maximum context length is 256 tokens.")


def test_prompts_are_logged_if_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with serving(toy_llm(), log_prompts=True) as it, caplog.at_level(logging.INFO, "paceline"):
        it.post("/v1/completions", {"prompt": "private words", "max_tokens": 2})
    assert any("private words" in record.getMessage() for record in caplog.records)


def test_other_origins_are_let_in_only_if_named() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(toy_llm()) as it:
        assert "access-control-allow-origin" not in it.get("/v1/models", headers=asked).headers
    with serving(toy_llm(), cors_origins=("https://a.example",)) as it:
        answer = it.get("/v1/models", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = it.get("/v1/models", headers={**asked, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_preflight_allows_the_headers_that_it_asks_for() -> None:
    """OpenAI's client for JavaScript sends a dozen additional headers."""
    wanted = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    with serving(toy_llm(), cors_origins=("https://a.example",)) as it:

        def preflight(origin: str) -> httpx.Response:
            return it.client.options("/v1/chat/completions", headers={**asked, "Origin": origin})

        answer = preflight("https://a.example")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-headers"] == wanted
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        refused = preflight("https://b.example")
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


def test_an_address_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidOption, match=f"port {port}: Address already in use"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    with pytest.raises(InvalidOption, match="--host"):
        check_address("300.1.1.1", port)


def test_an_empty_key_means_no_key() -> None:
    """An option from an unset variable has an empty key."""
    with pytest.raises(InvalidOption, match="API key must not be empty"):
        Settings(api_keys=("right", " "))
