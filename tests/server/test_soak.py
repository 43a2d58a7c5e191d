"""A soak test of the server: mixed valid and invalid traffic, clients that leave or stall, every speculation setting.

Memory stays flat after the warm-up, no slot is lost, no request is stuck, invalid requests are refused and all others
answered, and fixed requests get the same replies from the first minute to the last. PACELINE_SOAK_MINUTES sets the
length (3); half an hour with 20 clients is the full run.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.faults import RUNNING, WAITING, describe, is_error, read_gauges
from tests.support.load_client import Client, Exchange, read
from tests.support.server_process import ServerProcess, paceline_serve
from tests.support.traffic import CHAT, Traffic, TrafficRequest, largest, probes

pytestmark = [pytest.mark.slow, pytest.mark.model]

MINUTES = float(os.environ.get("PACELINE_SOAK_MINUTES", "3"))
CLIENTS = int(os.environ.get("PACELINE_SOAK_CLIENTS", "20"))
LEGS, WARM_LEGS = 10, 2
"""Number of parts of the run. Memory is compared in a break after each part. The first parts are the warm-up."""
PATIENCE = 120.0
"""Seconds after which a request counts as stuck."""
PROBE_EVERY, SAMPLE_EVERY = 20.0, 5.0
DRAFTERS = ("suffix", "ngram")
TOKENS = 96
FLAT = 1.02 if MINUTES >= 20 else 1.10
"""Maximum growth of idle memory after the warm-up. The warm-up of a short run ends before the caches are full."""
TOPICS = ("tides", "bread", "volcanoes", "bicycles", "the moon", "chess", "bees", "glass", "maps", "trains")
QUESTIONS = [
    f"{ask} {topic}{end}"
    for topic in TOPICS
    for ask, end in (("Explain", " to a child."), ("Write a short story about", "."), ("List ten facts about", "."))
] + [f"Summarise this: {' '.join(f'{topic} number {i} is described here.' for i in range(40))}" for topic in TOPICS]


@dataclass(slots=True)
class Soak:
    """Record of a run. `outcomes` counts requests by kind and outcome. `most` is the maximum of concurrent requests.
    `at_rest` is the memory in the breaks, in bytes."""

    server: ServerProcess
    model: str
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    most: float = 0.0
    at_rest: list[int] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.port

    def note(self, kind: str, outcome: str, detail: str = "") -> None:
        self.outcomes[kind, outcome] += 1
        if detail and len(self.details) < 20:
            self.details.append(f"{kind}, {outcome}: {detail}")

    def count(self, *outcomes: str) -> int:
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome in outcomes)


def test_the_server_holds() -> None:
    with ServerProcess("paceline serve", paceline_serve("--model demo --quantize int8 --prefix-memory 0.05")) as server:
        soak = Soak(server, server.model())
        left, concurrent = asyncio.run(run(soak))
        code = server.stop()
    print(f"{soak.count('answered')} answered, {[round(n / 2**20) for n in soak.at_rest]} MiB at rest")
    assert not soak.count("failed", "not refused", "429 without Retry-After"), soak.details
    assert not soak.count("stuck"), soak.details
    assert soak.count("answered") > 0
    assert not soak.differing, soak.differing
    assert soak.at_rest[-1] < FLAT * soak.at_rest[WARM_LEGS - 1], soak.at_rest
    assert not left[RUNNING] + left[WAITING], left
    assert concurrent >= soak.most > 0, "a slot is lost"
    assert code == 0


async def run(soak: Soak) -> tuple[dict[str, float], int]:
    """Send traffic until the time is up. Return the gauges, and the number of requests that then run at once."""
    fixed = probes(soak.model, QUESTIONS, DRAFTERS)
    await probe(soak, fixed)
    traffics = [Traffic(soak.model, QUESTIONS, DRAFTERS, TOKENS, seed) for seed in range(CLIENTS)]
    sampler = asyncio.create_task(sample(soak))
    # The largest load comes first, so that peak memory is not random.
    await asyncio.gather(*(send(soak, largest(soak.model, QUESTIONS, i), 5 * PATIENCE) for i in range(CLIENTS)))
    start, left = time.monotonic(), {}
    for leg in range(LEGS):
        end = start + 60 * MINUTES * (leg + 1) / LEGS
        await asyncio.gather(*(work(soak, traffic, end) for traffic in traffics), probe_until(soak, fixed, end))
        left = await settle(soak.port)
        await probe(soak, fixed)
        await asyncio.sleep(3)  # after one second without work the server frees what it does not need
        soak.at_rest.append(soak.server.resident)
    sampler.cancel()
    return left, await concurrent_requests(soak, int(soak.most))


async def work(soak: Soak, traffic: Traffic, end: float) -> None:
    """Run one client, which sends one request after another."""
    while time.monotonic() < end:
        await send(soak, traffic.draw(), PATIENCE)


async def send(soak: Soak, request: TrafficRequest, patience: float) -> None:
    async def on_part(found: Exchange) -> bool:
        if request.behaviour == "stall" and len(found.parts) == 2:
            await asyncio.sleep(request.count / 10)
        return request.behaviour == "leave" and len(found.parts) > request.count

    client = Client(soak.port, patience)
    found = await client.ask(request.path, request.body, on_part)
    client.close()
    if request.behaviour == "leave" and found.left:
        soak.note(request.kind, "left")
    elif found.status == 429:
        soak.note(request.kind, "busy (429)" if "retry-after" in found.headers else "429 without Retry-After")
    elif not request.valid:
        refused = is_error(found)
        soak.note(request.kind, "refused" if refused else "not refused", "" if refused else describe(found))
    else:
        error = read(found).error
        outcome = "answered" if not error else "stuck" if error.startswith("no end within") else "failed"
        soak.note(request.kind, outcome, error)


async def probe_until(soak: Soak, fixed: Mapping[str, TrafficRequest], end: float) -> None:
    while time.monotonic() + PROBE_EVERY < end:
        await asyncio.sleep(PROBE_EVERY)
        await probe(soak, fixed)


async def probe(soak: Soak, fixed: Mapping[str, TrafficRequest]) -> None:
    """Send all fixed requests in turn and compare with their first replies."""
    for name, request in fixed.items():
        client = Client(soak.port, PATIENCE)
        found = await client.ask(request.path, request.body)
        client.close()
        if found.status == 429:
            continue
        reply = choices(found) if found.status == 200 and not found.error else describe(found)
        if reply != soak.first.setdefault(name, reply) or found.status != 200:
            soak.differing.append(f"{name}: {str(reply)[:300]}")


def choices(found: Exchange) -> list[Any]:
    """Return a reply without the parts that may change: ids, times, speculation."""
    keys = ("index", "text", "message", "finish_reason", "logprobs")
    return [{key: choice[key] for key in keys if key in choice} for choice in found.json()["choices"]]


async def sample(soak: Soak) -> None:
    while True:
        try:
            gauges = await read_gauges(soak.port)
        except OSError as error:
            soak.note("metrics", "failed", str(error))
        else:
            soak.most = max(soak.most, gauges[RUNNING])
        await asyncio.sleep(SAMPLE_EVERY)


async def settle(port: int) -> dict[str, float]:
    """Return the gauges when no request runs or waits, or after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while True:
        gauges = await read_gauges(port)
        if not gauges[RUNNING] + gauges[WAITING] or time.monotonic() > end:
            return gauges
        await asyncio.sleep(0.2)


async def concurrent_requests(soak: Soak, count: int) -> int:
    """Return the number of `count` requests that run at once now."""
    message = {"role": "user", "content": "Count to a hundred."}
    body = json.dumps({"model": soak.model, "messages": [message], "max_tokens": 200, "ignore_eos": True}).encode()
    clients: Sequence[Client] = [Client(soak.port, 600.0) for _ in range(count)]
    asking = asyncio.gather(*(client.ask(CHAT, body) for client in clients))
    seen = 0.0
    while not asking.done():
        seen = max(seen, (await read_gauges(soak.port))[RUNNING])
        await asyncio.sleep(0.02)
    await asking
    for client in clients:
        client.close()
    return int(seen)
