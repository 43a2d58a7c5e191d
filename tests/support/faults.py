"""Faults that a server must survive: clients that disconnect, stall, drip or send garbage; kill -9; SIGTERM.

During and after each fault, a fixed request must get the same reply as before. A failed check raises `AssertionError`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.load_client import HOST, Client, Exchange, events, read
from tests.support.server_process import ServerProcess, free_port
from tests.support.traffic import CHAT, Traffic

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


async def read_gauges(port: int) -> dict[str, float]:
    """Return the gauges of /metrics, summed over labels. Raise `OSError` if there are none."""
    client = Client(port, timeout=60.0)
    found = await client.ask("/metrics")
    client.close()
    if found.status != 200:
        raise OSError(f"/metrics: {describe(found)}")
    totals = dict.fromkeys((RUNNING, WAITING), 0.0)
    for line in found.body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if (name := name.partition("{")[0]) in totals:
            totals[name] += float(value)
    return totals


def describe(found: Exchange) -> str:
    """Return the status, the start of the body and the error of a response."""
    return f"{found.status} {found.body[:200]!r} {found.error}"


def is_error(found: Exchange) -> bool:
    """Return True if a response is a client error in OpenAI's format."""
    try:
        error = found.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return 400 <= found.status < 500 and isinstance(error.get("message"), str) and "type" in error


@dataclass
class FaultTarget:
    """A server under attack. `expected` is the first reply to the fixed request, `patience` a timeout in seconds."""

    port: int
    model: str
    expected: str = ""
    patience: float = 60.0

    def body(self, tokens: int = 48, stream: bool = True, **more: Any) -> bytes:
        """Return the body of a chat request with a reply of `tokens` tokens."""
        messages = [{"role": "user", "content": "Count from one to five hundred, in words, one number per line."}]
        fields = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0.0, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields | more).encode()

    def post(self, *args: Any, **more: Any) -> bytes:
        """Return the same request as the bytes of an HTTP request."""
        body = self.body(*args, **more)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def probe(self) -> None:
        """Check that a well-behaved client gets the expected reply to the fixed request."""
        client = Client(self.port, self.patience)
        reply = read(await client.ask(CHAT, self.body(stream=False)))
        client.close()
        assert not reply.error, f"a well-behaved client got {reply.error}"
        self.expected = self.expected or reply.text
        assert reply.text == self.expected, f"a well-behaved client got {reply.text!r} instead of {self.expected!r}"

    async def active(self) -> float:
        """Return the number of running and waiting requests."""
        gauges = await read_gauges(self.port)
        return gauges[RUNNING] + gauges[WAITING]

    async def idle(self) -> None:
        """Wait until no request runs or waits."""
        end = time.monotonic() + self.patience
        while active := await self.active():
            assert time.monotonic() < end, f"still {active:.0f} requests active after {self.patience:g} s"
            await asyncio.sleep(0.1)

    async def open_streams(self, count: int, tokens: int, least: int = 2) -> list[asyncio.Task[Exchange]]:
        """Start `count` streams and wait until each has `least` parts."""
        begun = [asyncio.Event() for _ in range(count)]

        async def stream(event: asyncio.Event) -> Exchange:
            async def on_part(found: Exchange) -> bool:
                if len(found.parts) >= least:
                    event.set()
                return False

            client = Client(self.port, self.patience)
            try:
                return await client.ask(CHAT, self.body(tokens), on_part)
            finally:
                event.set()
                client.close()

        tasks = [asyncio.create_task(stream(event)) for event in begun]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), self.patience)
        return tasks


async def vanish(target: FaultTarget) -> None:
    """Reset connections in the middle of a stream."""
    for count in (1, 8, 8):
        writers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(target.post(400))
            await asyncio.wait_for(reader.readuntil(b"data:"), target.patience)
            writers.append(writer)
        for writer in writers:
            writer.transport.abort()
        await target.idle()


async def vanish_at_once(target: FaultTarget) -> None:
    """Reset connections before the first token, while the request waits or is in prefill."""
    for _ in range(20):
        _, writer = await asyncio.open_connection(HOST, target.port)
        writer.write(target.post(400))
        await writer.drain()
        writer.transport.abort()


async def stall(target: FaultTarget) -> None:
    """Request long replies without reading them, while other clients are answered."""
    connections = []
    for _ in range(6):
        connection = socket.create_connection((HOST, target.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(target.post(300, logprobs=True, top_logprobs=5))
        connections.append(connection)
    await asyncio.sleep(1)
    for _ in range(3):
        await target.probe()
    for connection in connections:
        connection.close()


async def drip(target: FaultTarget) -> None:
    """Send endless headers byte by byte (Slowloris), and check that they occupy no slot."""
    connections = [socket.create_connection((HOST, target.port)) for _ in range(50)]
    for byte in b"POST /v1/chat/completions HTTP/1.1\r\nX: ":
        for connection in connections:
            connection.send(bytes([byte]))
        await asyncio.sleep(0.02)
    await target.probe()
    active = await target.active()
    for connection in connections:
        connection.close()
    assert not active, f"incomplete headers hold {active:.0f} slots"


async def rubbish(target: FaultTarget) -> None:
    """Send bytes that are not HTTP, and check that the server answers 4xx or closes the connection."""
    dice = random.Random(1)
    for i in range(200):
        reader, writer = await asyncio.open_connection(HOST, target.port)
        writer.write((b"", b"GET ", b"POST /v1/chat/completions HTTP/9.9\r\n")[i % 3] + dice.randbytes(1 + i * 7 % 500))
        writer.write(b"\r\n\r\n")
        try:
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(-1), 20)
        except asyncio.TimeoutError:
            raise AssertionError("a connection with bytes that are not HTTP stays open") from None
        except OSError:  # the server has closed the connection
            answer = b""
        finally:
            writer.transport.abort()
        assert not answer or answer[8:10] == b" 4", f"answered {answer[:80]!r}"


async def incomplete_bodies(target: FaultTarget) -> None:
    """Send endless bodies, and check that they occupy no slot."""
    whole = target.post(400)
    writers = []
    for i in range(40):
        _, writer = await asyncio.open_connection(HOST, target.port)
        writer.write(whole[: len(whole) - 1 - i])
        await writer.drain()
        writers.append(writer)
    await target.probe()
    active = await target.active()
    for writer in writers:
        writer.transport.abort()
    assert not active, f"incomplete bodies hold {active:.0f} slots"


async def malformed(target: FaultTarget) -> None:
    """Send invalid bodies, and check that they are refused in OpenAI's format."""
    traffic = Traffic(target.model, ["Hello"], ["suffix"], 16, 3)
    client = Client(target.port, target.patience)
    for _ in range(400):
        request = traffic.invalid()
        found = await client.ask(request.path, request.body)
        assert is_error(found), f"{request.kind}: {describe(found)}"
    client.close()


CLIENT_FAULTS: tuple[Callable[[FaultTarget], Awaitable[None]], ...] = (
    *(vanish, vanish_at_once, stall, drip, rubbish, incomplete_bodies, malformed),
)


async def inject(target: FaultTarget, fault: Callable[[FaultTarget], Awaitable[None]]) -> None:
    """Run the fault, then check that no request is active and that the fixed request gets its reply."""
    await fault(target)
    await target.idle()
    await target.probe()


def killed(command: Sequence[str], patience: float = 60.0) -> None:
    """Kill the server during streams. Check that they break off, and that a new server gives the same replies."""
    port = free_port()
    with ServerProcess("server", command, port) as first:
        target = FaultTarget(port, first.model(), patience=patience)

        async def before() -> list[Exchange]:
            await target.probe()
            streams = await target.open_streams(4, 400)
            first.kill()
            return await asyncio.gather(*streams)

        for found in asyncio.run(before()):
            assert found.error, "a stream of a killed server ended as if complete"
            assert found.status == 200
    with ServerProcess("server", command, port):
        asyncio.run(target.probe())


def terminated(command: Sequence[str], tokens: int, deadline: float, patience: float = 60.0) -> int:
    """Send SIGTERM during 4 streams. Return the number of streams that finished.

    The others must end with an error event, new requests must be refused, and the server must exit with code 0 within
    `deadline` seconds.
    """
    with ServerProcess("server", command) as server:
        target = FaultTarget(server.port, server.model(), patience=patience)

        async def streams() -> tuple[list[Exchange], Exchange]:
            running = await target.open_streams(4, tokens)
            server.terminate()
            await asyncio.sleep(0.5)
            late = await Client(target.port, patience).ask(CHAT, target.body(4, stream=False))
            return await asyncio.gather(*running), late

        began = time.monotonic()
        ended, late = asyncio.run(streams())
        code = server.wait(max(1.0, deadline - (time.monotonic() - began)))
    assert code == 0, f"exit code {code} (None: it had to be killed)"
    assert late.status in (0, 503), f"a request after SIGTERM got {describe(late)}"
    errors = [read(found).error for found in ended]
    for found, error in zip(ended, errors, strict=True):
        assert not error or ends_with_error(found), f"a stream ended as {error}"
    return errors.count("")


def ends_with_error(found: Exchange) -> bool:
    """Return True if a stream is complete and has an error as its last event before [DONE]."""
    data = [data for _, data in events(found.parts) if data != b"[DONE]"]
    return not found.error and bool(data) and "error" in json.loads(data[-1])
