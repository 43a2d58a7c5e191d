"""What does the server do when clients and the machine misbehave? Each fault by itself, in about a minute.

Clients that vanish, stall, drip headers, send bytes or half a request; kill -9 in the middle of streams and a new
start; SIGTERM during streams, with time to finish them and without. In between and afterwards a fixed request must get
the very reply that it got first. Exit code 1 unless everything is as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, provenance, report, write
from serve_client import HOST, Client, Exchange, events, read
from serve_requests import CHAT, Wishes
from serve_servers import Server, free_port, ours
from serve_soak import RUNNING, WAITING, is_error, read_gauges
from serve_systems import model_name


class Wrong(AssertionError):
    """What should not have happened."""


def check(holds: bool, what: str) -> None:
    """Raises `Wrong`."""
    if not holds:
        raise Wrong(what)


@dataclass
class Site:
    """A server under attack. `right`: what the fixed request got first. `slow`: seconds to wait for what must come."""

    port: int
    model: str
    right: str = ""
    slow: float = 60.0

    def body(self, tokens: int = 48, stream: bool = True, **more: Any) -> bytes:
        """Of a request that is written on for a long time, if it may be."""
        messages = [{"role": "user", "content": "Count from one to five hundred, in words, one number per line."}]
        fields = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0.0, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields | more).encode()

    async def probe(self) -> None:
        """The fixed request, by a client of its own. Raises `Wrong` if it gets anything but the right reply."""
        client = Client(self.port, self.slow)
        found = await client.ask(CHAT, self.body(stream=False))
        client.close()
        reply = read(found)
        check(not reply.error, f"a well-behaved client got {reply.error}")
        self.right = self.right or reply.text
        check(reply.text == self.right, f"a well-behaved client got {reply.text!r} instead of {self.right!r}")

    async def idle(self) -> None:
        """Wait until nothing runs or waits. Raises `Wrong`."""
        end = time.monotonic() + self.slow
        while (gauges := await read_gauges(self.port))[RUNNING] + gauges[WAITING]:
            check(time.monotonic() < end, f"still {gauges} after {self.slow:g} s")
            await asyncio.sleep(0.1)

    async def open_streams(self, count: int, tokens: int, least: int = 2) -> list[asyncio.Task[Exchange]]:
        """Streams under way: each has got `least` parts already."""
        begun = [asyncio.Event() for _ in range(count)]

        async def stream(event: asyncio.Event) -> Exchange:
            async def watch(found: Exchange) -> bool:
                if len(found.parts) >= least:
                    event.set()
                return False

            client = Client(self.port, self.slow)
            try:
                return await client.ask(CHAT, self.body(tokens), watch=watch)
            finally:
                event.set()
                client.close()

        tasks = [asyncio.create_task(stream(event)) for event in begun]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), self.slow)
        return tasks


async def vanish(site: Site) -> str:
    """Clients break the connection off in the middle of a stream."""
    for count in (1, 8, 8):
        writers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(HOST, site.port)
            writer.write(post(site.body(400)))
            await asyncio.wait_for(reader.readuntil(b"data:"), site.slow)
            writers.append(writer)
        for writer in writers:
            writer.transport.abort()
        await site.idle()
    return "17 connections reset; nothing runs on"


async def vanish_at_once(site: Site) -> str:
    """Clients leave before anything came: the request is waiting or its prompt is being read."""
    for _ in range(20):
        _, writer = await asyncio.open_connection(HOST, site.port)
        writer.write(post(site.body(400)))
        await writer.drain()
        writer.transport.abort()
    await site.idle()
    return "20 requests sent and left; nothing runs on"


async def stall(site: Site) -> str:
    """Clients ask for much and read none of it."""
    stuck = []
    for _ in range(6):
        connection = socket.create_connection((HOST, site.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(site.body(300, logprobs=True, top_logprobs=5)))
        stuck.append(connection)
    await asyncio.sleep(1)
    for _ in range(3):
        await site.probe()
    for connection in stuck:
        connection.close()
    await site.idle()
    return "6 streams unread; 3 others answered meanwhile"


async def drip(site: Site) -> str:
    """Slow loris: headers that come byte by byte and never end."""
    slow = [socket.create_connection((HOST, site.port)) for _ in range(50)]
    for byte in b"POST /v1/chat/completions HTTP/1.1\r\nX: ":
        for connection in slow:
            connection.send(bytes([byte]))
        await asyncio.sleep(0.02)
    await site.probe()
    gauges = await read_gauges(site.port)
    for connection in slow:
        connection.close()
    check(not gauges[RUNNING] + gauges[WAITING], f"half-sent headers hold slots: {gauges}")
    return "50 connections with endless headers hold no slot"


async def rubbish(site: Site) -> str:
    """Bytes that are no HTTP."""
    dice = random.Random(1)
    for i in range(200):
        reader, writer = await asyncio.open_connection(HOST, site.port)
        writer.write((b"", b"GET ", b"POST /v1/chat/completions HTTP/9.9\r\n")[i % 3] + dice.randbytes(1 + i * 7 % 500))
        writer.write(b"\r\n\r\n")
        try:
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(-1), 20)
        except asyncio.TimeoutError:
            raise Wrong("a connection with bytes that are no HTTP stays open") from None
        except OSError:  # the server has hung up
            answer = b""
        finally:
            writer.transport.abort()
        check(not answer or answer[8:10] == b" 4", f"answered {answer[:80]!r}")
    return "200 connections refused"


async def halves(site: Site) -> str:
    """Requests whose body never comes to its end."""
    whole = post(site.body(400))
    left = []
    for i in range(40):
        _, writer = await asyncio.open_connection(HOST, site.port)
        writer.write(whole[: len(whole) - 1 - i])
        await writer.drain()
        left.append(writer)
    await site.probe()
    gauges = await read_gauges(site.port)
    for writer in left:
        writer.transport.abort()
    check(not gauges[RUNNING] + gauges[WAITING], f"half requests hold slots: {gauges}")
    return "40 half requests hold no slot"


async def malformed(site: Site) -> str:
    """Bodies that must be refused, in OpenAI's shape."""
    wishes = Wishes(site.model, ["Hello"], ["suffix"], 16, 3)
    client = Client(site.port, site.slow)
    for _ in range(400):
        wish = wishes.garbage()
        found = await client.ask(wish.path, wish.body)
        says = f"{wish.kind}: {found.status} {found.body[:200]!r} {found.error}"
        check(400 <= found.status < 500 and is_error(found), says)
    client.close()
    return "400 bodies refused with 4xx"


def post(body: bytes) -> bytes:
    """A whole chat request."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


CLIENTS: tuple[Callable[[Site], Awaitable[str]], ...] = (
    *(vanish, vanish_at_once, stall, drip, rubbish, halves, malformed),
)
"""Faults of clients, which one server must bear one after the other."""


async def misbehave(site: Site, fault: Callable[[Site], Awaitable[str]]) -> str:
    """The fault, and the fixed request after it. Raises `Wrong`."""
    said = await fault(site)
    await site.idle()
    await site.probe()
    return said


def killed(command: Sequence[str], slow: float = 60.0) -> str:
    """kill -9 in the middle of streams, and a new start on the same port. Raises `Wrong`."""
    port = free_port()
    with Server("server", command, port) as first:
        site = Site(port, model_name(port), slow=slow)

        async def before() -> list[Exchange]:
            await site.probe()
            streams = await site.open_streams(4, 400)
            first.kill()
            return await asyncio.gather(*streams)

        for found in asyncio.run(before()):
            check(bool(found.error) and found.status == 200, f"a client of a killed server was told {found.error!r}")
    with Server("server", command, port):
        asyncio.run(site.probe())
    return "4 streams broke off; the same port answers right again"


def terminated(command: Sequence[str], tokens: int, deadline: float, slow: float = 60.0) -> str:
    """SIGTERM while streams run: each finishes or ends with an error event, new requests are refused, exit code 0
    within `deadline` seconds. Raises `Wrong`."""
    with Server("server", command) as server:
        site = Site(server.port, model_name(server.port), slow=slow)

        async def streams() -> tuple[list[Exchange], Exchange]:
            running = await site.open_streams(4, tokens)
            server.terminate()
            await asyncio.sleep(0.5)
            late = await Client(site.port, slow).ask(CHAT, site.body(4, stream=False))
            return await asyncio.gather(*running), late

        began = time.monotonic()
        ended, late = asyncio.run(streams())
        code = server.wait(max(1.0, deadline - (time.monotonic() - began)))
        seconds = time.monotonic() - began
    check(code == 0, f"exit code {code} after {seconds:.1f} s (None: it had to be killed)")
    check(late.status in (0, 503), f"a request after SIGTERM got {late.status} {late.body[:100]!r}")
    finished = sum(not read(found).error for found in ended)
    for found in ended:
        check(not read(found).error or ends_with_error(found), f"a stream ended as {read(found).error}")
    return (
        f"{finished} of {len(ended)} streams finished, the others ended with an error event; code 0 in {seconds:.1f} s"
    )


def ends_with_error(found: Exchange) -> bool:
    """Whether a stream's last event but [DONE] is an error, and the response came to its proper end."""
    said = [data for _, data in events(found.parts) if data != b"[DONE]"]
    return not found.error and bool(said) and "error" in json.loads(said[-1])


def main() -> None:
    args = _arguments()
    command = shlex.split(args.command or "") or ours(f"--model {args.model} {args.serve}")
    rows = [*_of_clients(command, args.slow)]
    rows.append(_row("kill -9 and a new start", lambda: killed(command, args.slow)))
    rows.append(_row("SIGTERM, time enough", lambda: terminated(command, 60, args.slow)))
    hurried = [*command, *shlex.split(args.hurry)]
    rows.append(_row("SIGTERM, too little time", lambda: terminated(hurried, 2000, args.slow)))
    grid = Grid("Faults", ["fault", "found", "held"], rows)
    report([grid])
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write("serve-faults", {"provenance": provenance(**settings), "faults": rows}, [grid], folder=args.out)
    sys.exit(any(row[2] == "NO" for row in rows))


def _of_clients(command: Sequence[str], slow: float) -> list[list[str]]:
    with Server("server", command) as server:
        site = Site(server.port, model_name(server.port), slow=slow)
        asyncio.run(site.probe())
        return [_row(fault.__name__, lambda fault=fault: asyncio.run(misbehave(site, fault))) for fault in CLIENTS]


def _row(name: str, act: Callable[[], str]) -> list[str]:
    try:
        return [name, act(), "yes"]
    except (Wrong, OSError, EOFError, asyncio.TimeoutError, SystemExit) as error:
        return [name, f"{type(error).__name__}: {error}"[:300], "NO"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--serve", default="--quantize int8", help="further words for `paceline serve`")
    parser.add_argument("--command", help="another server's command instead")
    parser.add_argument("--hurry", default="--grace 1", help="words that give it a second to stop in")
    parser.add_argument("--slow", type=float, default=60.0, help="seconds within which what must come has to come")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
