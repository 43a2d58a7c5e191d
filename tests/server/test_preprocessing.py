"""Requests before they reach the engine: grammars, long texts, deadlines, clients that disconnect."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import threading
import time
from typing import Any

import pytest
from starlette.requests import Request

from paceline.llm import LLM
from paceline.sampling.grammar import live_bytes
from paceline.server import bodies, grammars
from paceline.server.apis.completions import CompletionRequest
from paceline.server.apis.tokens import TokenizeRequest
from paceline.server.errors import ApiError
from paceline.server.limits import Settings
from paceline.server.preprocessing import Preprocessor
from tests.support.running import Serving, serving
from tests.support.slow_llm import slow_llm
from tests.support.toys import toy_llm
from tests.support.vocabularies import byte_level, speaker

pytest.importorskip("llguidance")
pytestmark = pytest.mark.forks

SLOW: dict[str, Any] = {"type": "integer", "multipleOf": 10000301}
"""A schema that takes minutes and gigabytes to compile."""


@pytest.fixture(scope="module")
def spoken() -> Any:
    """Serve a model with a tokenizer that has byte tokens, for a bound on the number of tokens."""
    with serving(LLM(speaker(byte_level()))) as it:
        yield it


def sent(it: Serving, path: str, body: Any, size: int | None = None) -> socket.socket:
    """Return a connection after sending a request, or its first `size` bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", int(it.address.rpartition(":")[2])), timeout=60)
    connection.sendall(head.encode() + data[:size])
    return connection


def test_a_grammar_that_takes_too_much_is_refused(spoken: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_SECONDS", 0.2)
    before = live_bytes()
    for _ in range(2):  # the second time, from memory
        answer = spoken.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_json": SLOW})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "guided_json"
        assert "takes more than 0.2 s" in answer.json()["error"]["message"]
    assert live_bytes() == before


def test_timeouts_count_from_the_arrival(spoken: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 4, "timeout": 0.3, "guided_json": {**SLOW, "multipleOf": 10000303}}
    answer = spoken.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    quick = {"prompt": "a", "max_tokens": 1, "timeout": 0.3}
    with sent(spoken, "/v1/completions", quick, 20) as slow:
        time.sleep(0.5)
        slow.sendall(json.dumps(quick).encode()[20:])
        assert b" 504 " in slow.recv(64)


def test_abandoned_grammars_do_not_delay_other_clients(spoken: Serving) -> None:
    for n in range(12):
        body = {"prompt": "a", "max_tokens": 4, "guided_json": {**SLOW, "multipleOf": 10000321 + 2 * n}}
        with sent(spoken, "/v1/completions", body):
            time.sleep(0.05)
    assert spoken.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 200
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert spoken.post("/v1/completions", {"prompt": "a", "guided_json": schema}).status_code == 200
    assert spoken.idle()


def test_grammars_in_use_have_a_bound(spoken: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_COMPILED_BYTES", 1)
    answer = spoken.post("/v1/completions", {"prompt": "a", "guided_regex": "[ab]{3}c"})
    assert answer.status_code == 429


def test_the_number_of_planned_requests_is_limited() -> None:
    with serving(LLM(speaker(byte_level())), max_requests=1) as it:
        assert any(refused_meanwhile(it, 10000393 + 2 * n) for n in range(50)), "whichever of the two comes first"


def refused_meanwhile(it: Serving, number: int) -> bool:
    with sent(it, "/v1/completions", {"prompt": "a", "guided_json": {**SLOW, "multipleOf": number}}):
        time.sleep(0.1)
        return it.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 429


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoken.llm.tokenizer, "encode", None)
    for path, body in (
        ("/v1/completions", {"prompt": "ab" * 500_000}),
        ("/v1/completions", {"prompt": ["a" * 50_000]}),
    ):
        answer = spoken.post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    with serving(toy_llm()) as it:  # whose tokenizer has no bound
        assert it.post("/v1/completions", {"prompt": "ab" * 50_000}).json()["error"]["code"] == (
            "context_length_exceeded"
        )


def test_a_client_that_leaves_in_its_body_is_one_line(spoken: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    for size in (5, 100_000):
        caplog.clear()
        with sent(spoken, "/v1/completions", {"prompt": "a" * 200_000}, size):
            time.sleep(0.2)
        until = time.monotonic() + 10
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.02)
        assert [record.exc_info for record in caplog.records] == [None]
        assert "/v1/completions 499" in caplog.records[0].getMessage()
    assert spoken.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_stalled_bodies_make_room_for_others() -> None:
    with serving(toy_llm(), max_bodies=1_000_000) as it:
        stalled = [sent(it, "/v1/completions", {"prompt": "a" * 500_000}, 490_000) for _ in range(4)]
        short = {"prompt": "a", "max_tokens": 1}
        for _ in range(8):
            assert it.post("/v1/completions", {**short, "user": "a" * 400_000}).status_code == 200
        assert it.post("/v1/completions", short).status_code == 200
        first = stalled[0].recv(4096)
        for connection in stalled:
            connection.close()
        assert first.startswith(b"HTTP/1.1 503")
        assert b"too_many_bytes" in first
        large = it.post("/v1/completions", {**short, "user": "a" * 900_000})
        assert large.status_code == 200, "all of it was given back"


def test_clients_take_turns() -> None:
    """A client with many requests waits behind a client with few requests."""
    done: list[str] = []

    async def ask(preprocessor: Preprocessor, client: str, count: int) -> None:
        await asyncio.gather(*(preprocessor.run("long", client, lambda: done.append(client)) for _ in range(count)))

    async def main() -> None:
        preprocessor = Preprocessor()
        held = threading.Event()
        first = asyncio.create_task(preprocessor.run("long", "a", lambda: held.wait(20)))
        many = asyncio.create_task(ask(preprocessor, "a", 9))
        await asyncio.sleep(0.05)
        gone = [asyncio.create_task(ask(preprocessor, "c", 3)) for _ in range(2)]
        few = asyncio.create_task(ask(preprocessor, "b", 2))
        await asyncio.sleep(0.05)
        for task in gone:
            task.cancel()
        await asyncio.sleep(0.05)
        held.set()
        await asyncio.gather(first, many, few)
        assert await preprocessor.run("long", "d", lambda: "free") == "free"
        preprocessor.close()

    asyncio.run(main())
    assert done == ["a", "b", "a", "b", *"aaaaaaa"]


def test_texts_to_tokenise_hold_up_no_reply(spoken: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    held, encode = threading.Event(), spoken.llm.tokenizer.encode

    def slow(text: str, special: bool = True) -> list[int]:
        if text.startswith("b"):
            held.wait(30)
        return encode(text, special)

    monkeypatch.setattr(spoken.llm.tokenizer, "encode", slow)
    with sent(spoken, "/tokenize", {"prompt": "b" * 100_000}), sent(spoken, "/tokenize", {"prompt": "b"}):
        time.sleep(0.3)
        long = {"prompt": "a", "max_tokens": 1, "user": "x" * 100_000}
        assert spoken.post("/v1/completions", long).status_code == 200
        held.set()


def test_requests_for_tokens_pass_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(toy_llm(), max_requests=1, timeout=0.5) as it:
        held = threading.Event()
        monkeypatch.setattr(it.llm.tokenizer, "encode", lambda *_, **__: held.wait(30))
        with sent(it, "/tokenize", {"prompt": "a"}) as waiting:
            time.sleep(0.2)
            assert it.post("/tokenize", {"prompt": "a"}).status_code == 429
            assert b" 504 " in waiting.recv(64)
        held.set()


def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_ARRIVAL_SECONDS", 0.4)
    with serving(toy_llm()) as it, sent(it, "/v1/completions", {"prompt": "a" * 200_000}, 50_000) as stalled:
        answer = stalled.recv(4096)  # within the minute that `sent` waits
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_keeps_arriving_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_ARRIVAL_SECONDS", 0.4)
    with serving(toy_llm()) as it, sent(it, "/tokenize", {"prompt": "a" * 400_000}, 300_000) as slow:
        time.sleep(0.7)  # the bytes that have arrived extend the limit by three seconds
        slow.sendall(b"a" * (400_000 - 300_000 + len('{"prompt": ""}') - 2) + b'"}')
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


def posted(body: Any) -> Request:
    """Return a request with a complete body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


PARTS = [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    "body",
    [{"prompt": "a" * 450_000}, {"messages": [{"role": "user", "content": PARTS * 1100}] * 2}],
    ids=["as they were sent", "with the memory that they take"],
)
def test_bodies_count_until_they_are_planned(body: Any) -> None:
    async def check() -> None:
        preprocessor = Preprocessor()
        total = 2_500_000 if "messages" in body else 1_000_000
        limits = Settings(max_body=2**20, max_bodies=total, max_images=0, max_image_bytes=0)
        reader = bodies.BodyReader(preprocessor, limits)
        async with reader.read(posted(body), TokenizeRequest), reader.read(posted(body), TokenizeRequest):
            with pytest.raises(ApiError, match="too many large requests at once"):
                async with reader.read(posted({"prompt": "a" * 450_000}), TokenizeRequest):
                    pass
            async with reader.read(posted({"prompt": "a"}), TokenizeRequest) as (small, _):
                assert small.prompt == "a"
        async with reader.read(posted({"prompt": "a" * 450_000}), TokenizeRequest) as (large, _):
            assert large.prompt == "a" * 450_000
        preprocessor.close()

    asyncio.run(check())


def test_a_body_is_dropped_when_its_reply_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> list[Any]:
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is CompletionRequest]

    gc.freeze()  # what there is already need not be searched
    with serving(slow_llm(monkeypatch)) as it:
        body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "user": "b" * 1000}
        for more in ({}, {"stream": True}):
            with sent(it, "/v1/completions", {**body, **more}):
                until = time.monotonic() + 20
                while (not it.worker.load.running or kept()) and time.monotonic() < until:
                    time.sleep(0.02)
                assert it.worker.load.running
                assert not kept()
            assert it.idle()
    gc.unfreeze()


def test_a_stop_during_a_body_is_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(toy_llm()) as it:
        connection = sent(it, "/v1/completions", {"prompt": "a" * 200_000}, 100_000)
        time.sleep(0.2)
    with connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")
    assert not [record for record in caplog.records if record.exc_info]


def test_the_description_requires_authorisation() -> None:
    with serving(toy_llm(), api_keys=("k",)) as it:
        assert it.get("/openapi.json").status_code == 401
        assert it.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()["info"]["title"] == "Paceline"
    with serving(toy_llm(), hosts=["127.0.0.1"]) as it:
        assert it.get("/openapi.json", headers={"Host": "evil.example"}).status_code == 403
        assert it.get("/openapi.json").status_code == 200


def test_short_requests_do_not_wait_for_long_texts(spoken: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    held, encode = threading.Event(), spoken.llm.tokenizer.encode
    tokenised = []

    def slow(text: str, special: bool = True) -> list[int]:
        if len(text) > 1000:
            tokenised.append(held.wait(30))
        return encode(text, special)

    monkeypatch.setattr(spoken.llm.tokenizer, "encode", slow)
    with sent(spoken, "/tokenize", {"prompt": "a" * 100_000}), sent(spoken, "/tokenize", {"prompt": "a" * 100_000}):
        time.sleep(0.3)
        assert spoken.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert spoken.get("/api/tags").status_code == 200
        assert spoken.post("/api/show", {"model": "toy"}).status_code == 200
        assert not tokenised
        held.set()
