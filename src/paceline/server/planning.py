"""Threads that plan requests: templates, tokens, grammars. Off the event loop, and apart by how long that may take."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from paceline.text.sandbox import ABANDONED

T = TypeVar("T")
Lane = Literal["parse", "short", "long", "grammar", "tokens"]
"""What is to be done: parse a large body; plan a request with little text, with much, with a grammar; /tokenize."""

LONG = 1 << 16
"""Bytes of a body from which its text is long: it takes milliseconds to parse and more to tokenise."""

_THREADS: dict[Lane, int] = {"parse": 1, "short": 2, "long": 1, "grammar": 2, "tokens": 1}


def client_of(request: Request) -> str:
    """Identify the client: by its key, or by its address if it has none."""
    return request.headers.get("authorization") or (request.client.host if request.client else "")


class Planning:
    """A few threads for each kind of work, so that one kind never waits for another. Clients take turns."""

    def __init__(self) -> None:
        self._lanes = {lane: _Threads(lane, count) for lane, count in _THREADS.items()}

    async def run(self, lane: Lane, client: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. Cancelled, it drops work that has not begun and ends jobs of the sandbox."""
        return await self._lanes[lane].run(client, work)

    def close(self) -> None:
        """Drop what has not begun."""
        for lane in self._lanes.values():
            lane.close()


class _Threads:
    """One lane. For the event loop alone."""

    def __init__(self, lane: Lane, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, f"paceline-{lane}", None if lane == "short" else _yield_to_others)
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client; the first one's turn is next."""

    async def run(self, client: str, work: Callable[[], T]) -> T:
        await self._turn(client)
        abandoned = threading.Event()
        context = copy_context()
        context.run(ABANDONED.set, abandoned)
        future = self._pool.submit(context.run, work)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call(loop, self._pass_on))  # and not before: the thread is taken until then
        try:
            return await asyncio.wrap_future(future)
        finally:
            abandoned.set()

    async def _turn(self, client: str) -> None:
        """Wait for a free thread."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it was this one's turn just then
            raise

    def _pass_on(self) -> None:
        """A thread is free: let the next client have it."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if not turn.done():
                    if turns:
                        self._waiting[client] = turns
                    turn.set_result(None)
                    return
        self._free += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(what)


def _yield_to_others() -> None:
    """Let the engine's threads go first on the processor. Linux has a priority for each thread; others do not."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
