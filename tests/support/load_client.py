"""A lean HTTP client for an OpenAI-compatible server, and a closed loop of such clients.

The client shares the machine with the server under test, so it only stores bytes and times. They are parsed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"


@dataclass(slots=True)
class Exchange:
    """A response as it arrived, with times from `time.perf_counter`.

    `status` is 0 without a response. `left` is True if the client disconnected before the end.
    """

    began: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""
    left: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)

    def json(self) -> Any:
        return json.loads(self.body)


OnPart = Callable[[Exchange], Awaitable[bool]]


class Client:
    """A keep-alive connection for one request at a time."""

    def __init__(self, port: int, timeout: float = 600.0) -> None:
        """Create a client with a timeout in seconds per request."""
        self._port, self._timeout = port, timeout
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, path: str, body: bytes | None = None, on_part: OnPart | None = None) -> Exchange:
        """POST a JSON body, or GET without one. Failures of the server are stored in `Exchange.error`.

        `on_part` is awaited after each part that arrives; if it returns True, the client disconnects.
        """
        found = Exchange(time.perf_counter())
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {HOST}:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n\r\n"
        try:
            await asyncio.wait_for(self._exchange(head.encode() + (body or b""), found, on_part), self._timeout)
        except asyncio.TimeoutError:
            found.error = f"no end within {self._timeout:g} s"
        except (OSError, EOFError, ValueError) as error:
            found.error = f"{type(error).__name__}: {error}"
        found.ended = time.perf_counter()
        if found.error or found.left or found.headers.get("connection") == "close":
            self.close()
        return found

    async def _exchange(self, request: bytes, found: Exchange, on_part: OnPart | None) -> None:
        kept = self._writer is not None
        try:
            reader = await self._send(request, found)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if not kept or getattr(error, "partial", b""):
                raise
            self.close()  # the server may disconnect between requests
            reader = await self._send(request, found)
        async for data in read_body(reader, found.headers):
            found.parts.append((time.perf_counter(), data))
            if on_part is not None and await on_part(found):
                found.left = True
                return

    async def _send(self, request: bytes, found: Exchange) -> asyncio.StreamReader:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        self._writer.write(request)
        found.status, found.headers = await read_head(self._reader)
        return self._reader

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status and the headers, with names in lower case. Raise `EOFError` or `ValueError` on failure."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (text.partition(":") for text in lines if text)
    return int(line.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raise `EOFError` if it breaks off, and `ValueError` if it is not valid."""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline() or _broken(), 16):
            data = await reader.readexactly(size + 2)
            yield data[:-2]
        await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(65536):
            yield data


def _broken() -> bytes:
    raise EOFError("the stream broke off")


@dataclass(slots=True)
class Reply:
    """A parsed reply.

    `texts` are the arrival times of text. `error` is the reason if the reply is invalid, or "". `speculation` is the
    server's statistics in `usage`.
    """

    began: float
    ended: float
    texts: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first text."""
        return self.texts[0] - self.began

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.texts[-1] - self.texts[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between texts."""
        return [b - a for a, b in zip(self.texts, self.texts[1:], strict=False)]

    def within(self, begin: float, end: float) -> float:
        """Return the number of tokens between two times, with tokens spread evenly over the texts."""
        return self.tokens * sum(begin <= t < end for t in self.texts) / len(self.texts) if self.texts else 0.0


def events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of server-sent events, each with the arrival time of its last byte."""
    kept = b""
    for when, data in parts:
        *whole, kept = (kept + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield when, line[5:].strip()


def read(found: Exchange) -> Reply:
    """Parse the reply to a chat or completion request with one choice, streamed or whole."""
    reply = Reply(found.began, found.ended, error=found.error)
    if found.status != 200:
        reply.error = reply.error or f"status {found.status}: {found.body[:300]!r}"
    elif "event-stream" in found.headers.get("content-type", ""):
        _read_stream(found, reply)
    else:
        try:
            _take(reply, found.json(), found.ended)
        except ValueError as error:
            reply.error = reply.error or f"not JSON: {error}"
    if not reply.error and not (reply.finish and reply.tokens):
        reply.error = f"incomplete: finish {reply.finish!r}, {reply.tokens} tokens"
    return reply


def _read_stream(found: Exchange, reply: Reply) -> None:
    done = False
    for when, data in events(found.parts):
        if data == b"[DONE]":
            done = True
        else:
            try:
                _take(reply, json.loads(data), when)
            except ValueError as error:
                reply.error = reply.error or f"an event is not JSON: {error}"
    if not done and not reply.error:
        reply.error = "the stream ended without [DONE]"


def _take(reply: Reply, said: dict[str, Any], when: float) -> None:
    if "error" in said:
        reply.error = reply.error or f"error event: {said['error']}"
    for choice in said.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        if text := part.get("content") or part.get("text"):
            reply.text += text
            reply.texts.append(when)
        reply.finish = choice.get("finish_reason") or reply.finish
    if usage := said.get("usage"):
        reply.tokens, reply.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reply.speculation = usage.get("speculation") or {}


@dataclass(slots=True)
class Load:
    """Result of a closed loop. `replies` are in the order of the requests.

    `full` is the time when the last client started, and `dry` the time when a client first found no request left. All
    clients are busy between the two. `client_seconds` is the CPU time of the clients, and `wall` the total time.
    """

    replies: list[Reply]
    full: float
    dry: float
    wall: float
    client_seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second while all clients were busy, or NaN if they never were."""
        if self.dry <= self.full:
            return math.nan
        return sum(r.within(self.full, self.dry) for r in self.replies) / (self.dry - self.full)


async def closed_loop(
    port: int, path: str, bodies: Sequence[bytes], clients: int, spacing: float = 0.0, timeout: float = 600.0
) -> Load:
    """Send all `bodies` from `clients` clients. Each client sends its next request when its previous one is answered.

    `spacing` is the number of seconds between the starts of two clients.
    """
    exchanges: list[Exchange | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))
    full = dry = 0.0

    async def work(index: int) -> None:
        nonlocal full, dry
        await asyncio.sleep(index * spacing)
        full = max(full, time.perf_counter())
        client = Client(port, timeout)
        for i, body in waiting:
            exchanges[i] = await client.ask(path, body)
        dry = dry or time.perf_counter()
        client.close()

    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(i) for i in range(clients)))
    wall, spent = time.perf_counter() - began, time.process_time() - spent
    return Load([read(e) for e in exchanges if e is not None], full, dry, wall, spent)
