"""The load client, the load figures and the faults: they must detect failures of a stub server without a model."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from tests.support import faults, traffic
from tests.support import load_client as client
from tests.support.server_process import ServerProcess

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE.parent / "benchmarks"))
figures, systems = import_module("serve_figures"), import_module("serve_systems")

STREAM = b"""data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\r\n\r\n\
data: {"choices": [{"delta": {"content": "one "}, "finish_reason": null}]}\n\n\
: a comment\n\n\
data: {"choices": [{"delta": {"content": "two"}, "finish_reason": "stop"}]}\n\n\
data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9, \
"prompt_tokens_details": {"cached_tokens": 4}}}\n\n\
data: [DONE]\n\n"""


def exchange(*parts: bytes, kind: str = "text/event-stream", status: int = 200) -> object:
    found = client.Exchange(10.0, status, {"content-type": kind}, list(enumerate(parts, 11)))
    found.ended = 20.0
    return found


@pytest.mark.parametrize("cut", range(0, len(STREAM), 7))
def test_a_stream_is_read_wherever_it_is_cut(cut):
    reply = client.read(exchange(STREAM[:cut], STREAM[cut:]))
    assert (reply.text, reply.finish, reply.tokens, reply.prompt_tokens, reply.cached) == ("one two", "stop", 3, 9, 4)
    assert reply.error == ""
    assert len(reply.texts) == 2


def test_the_time_of_an_event_is_the_time_of_its_last_part():
    at = STREAM.index(b'one "') + 2
    reply = client.read(exchange(STREAM[:at], STREAM[at:]))
    assert reply.texts[0] == 12
    assert reply.first == 2.0


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (STREAM.replace(b"data: [DONE]", b""), "without [DONE]"),
        (
            STREAM[: STREAM.index(b"data: [DONE]")] + b'data: {"error": {"message": "oh"}}\n\ndata: [DONE]\n\n',
            "error event",
        ),
        (b"data: {oh\n\ndata: [DONE]\n\n", "not JSON"),
        (b"data: [DONE]\n\n", "incomplete"),
    ],
)
def test_an_invalid_stream_is_an_error(parts, error):
    assert error in client.read(exchange(parts)).error


def test_another_status_is_an_error():
    assert "status 429" in client.read(exchange(b"{}", kind="application/json", status=429)).error


def test_tokens_are_spread_over_their_texts():
    reply = client.Reply(0.0, 9.0, texts=[1.0, 2.0, 3.0, 4.0], tokens=8)
    assert reply.within(2.0, 4.0) == 4.0
    assert reply.per_token == pytest.approx(3 / 7)


def test_percentile_is_a_value_that_occurred():
    assert figures.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert figures.percentile(range(1, 101), 0.99) == 99
    assert figures.percentile([5.0], 0.5) == 5.0


STUB = [sys.executable, str(HERE / "support" / "stub_server.py")]


def stub(*options: str) -> ServerProcess:
    return ServerProcess("stub", [*STUB, *options])


def measured(server, clients: int = 4) -> dict[str, object]:
    """Return figures for forty requests, compared with the replies to a single client."""
    requests = [systems.LoadRequest(i % 7, f"question {i % 7}", 12, 0.0, i % 7) for i in range(40)]
    system = systems.Http("auto", server, {"speculation": "auto"})
    right = {(i, 0.0): figures.text_of(r) for i, r in enumerate(system.answer(requests[:7], 1, 0.0).replies)}
    load = system.answer(requests, clients, 0.01)
    return figures.summarise([figures.Turn("auto", 0.0, clients, 0, requests, load, 1.0)], right)


def test_a_good_server_has_no_failures():
    with stub() as server:
        found = measured(server)
        assert (found["requests"], found["failed"], found["differ"]) == (40, 0, 0)
        assert found["tokens_per_second"] > 0
        assert found["tokens_per_round"] == 2.0
        assert found["first"]["median"] <= found["first"]["p99"]
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("words", "key"), [(("--wrong", "9"), "differ"), (("--broken", "9"), "failed")])
def test_wrong_texts_and_broken_streams_are_counted(words, key):
    with stub(*words) as server:
        assert 0 < measured(server)[key] < 40


def summary(system: str, clients: int, speeds: list[float], **more: object) -> dict[str, object]:
    latency = {"median": 1.0, "p99": 2.0}
    found = {"system": system, "temperature": 0.0, "clients": clients, "requests": 9, "failed": 0, "differ": 0}
    return found | {"speeds": speeds, "tokens_per_second": speeds[0], "first": latency} | more


def good() -> list[dict[str, object]]:
    small = [summary("off", 1, [50.0, 50.0]), summary("off", 16, [140.0, 150.0]), summary("auto", 16, [160.0, 170.0])]
    return [*small, summary("auto", 48, [500.0, 510.0]), summary("openvino", 48, [490.0, 480.0], differ=None)]


def missed(summaries: list[dict[str, object]]) -> list[str]:
    return [goal for goal, _, held in figures.goals(figures.Table(summaries), [0.0], [1, 16, 48]) if not held]


def test_goals_hold_for_good_figures():
    assert missed(good()) == []
    assert len(figures.goals(figures.Table(good()), [0.0], [1, 16, 48])) == 6


@pytest.mark.parametrize(
    ("at", "change", "goal"),
    [
        (0, {"failed": 1}, "no request fails"),
        (2, {"differ": 1}, "every reply"),
        (2, {"speeds": [140.0, 149.0]}, "3 times"),
        (1, {"speeds": [170.0, 180.0]}, "not slower"),
        (2, {"first": {"median": 1.0, "p99": 4.5}}, "p99"),
        (4, {"speeds": [501.0, 520.0]}, "OpenVINO"),
    ],
)
def test_goals_are_missed_for_bad_figures(at, change, goal):
    summaries = good()
    summaries[at] |= change
    found = missed(summaries)
    assert len(found) == 1
    assert goal in found[0]


def test_traffic_has_every_kind_and_corrupt_bodies_differ():
    mix = traffic.Traffic("stub", ["one", "two", "three"], ["suffix"], 20, 1)
    drawn = [mix.draw() for _ in range(300)]
    assert {request.kind.partition(":")[0] for request in drawn} >= {
        "chat",
        "long prompt",
        "client leaves",
        "invalid",
        "n > 1",
    }
    whole = {"model": "stub", "prompt": "x"}
    assert all(traffic.corrupt(Random(i), whole)[1] != b'{"model": "stub", "prompt": "x"}' for i in range(100))


def inject(server, fault) -> None:
    asyncio.run(faults.inject(faults.FaultTarget(server.port, "stub", patience=2.0), fault))


@pytest.mark.slow
def test_a_good_server_survives_all_faults():
    with stub("--delay", "0.01") as server:
        for fault in faults.CLIENT_FAULTS:
            if fault is not faults.stall:
                inject(server, fault)


@pytest.mark.slow
def test_a_reply_that_continues_without_its_client_is_noticed():
    with stub("--leak") as server, pytest.raises(AssertionError, match="still"):
        inject(server, faults.vanish)


@pytest.mark.slow
def test_another_reply_than_before_is_noticed():
    async def twice() -> None:
        target = faults.FaultTarget(server.port, "stub", patience=2.0)
        await target.probe()
        await target.probe()

    with stub("--wrong", "2") as server, pytest.raises(AssertionError, match="instead of"):
        asyncio.run(twice())


@pytest.mark.slow
def test_a_stream_that_sigterm_breaks_off_is_noticed():
    command = [*STUB, "--delay", "0.1"]
    with pytest.raises(AssertionError, match="a stream ended as"):
        faults.terminated(command, 2000, 20.0, patience=20.0)
    assert faults.terminated(STUB, 60, 20.0, patience=20.0) == 4
