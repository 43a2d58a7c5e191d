"""Work off the event loop: thread pools for templates, tokens and grammars; deadlines; clients that leave."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from math import inf
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from paceline.server.limits import authorization
from paceline.text.sandbox import ABANDONED

T = TypeVar("T")
PoolName = Literal["parse", "short", "long", "grammar", "tokens", "documents", "images"]
"""Kind of work: parse a large body; prepare a request with a short text, a long text, or a grammar; tokenise without
generating; prepare or tokenise a request with images; write documents about the server, such as its list of models."""

MAX_SHORT_BODY = 1 << 16
"""Maximum bytes of a short body. A longer body takes milliseconds to parse, and even longer to tokenise."""

_THREADS: dict[PoolName, int] = {
    "parse": 1,
    "short": 2,
    "long": 1,
    "grammar": 2,
    "tokens": 1,
    "documents": 1,
    "images": 2,
}


def client_id(request: Request) -> str:
    """Identify the client by its API key, or by its address if it has none."""
    return authorization(request.headers) or (request.client.host if request.client else "")


class Preprocessor:
    """One small thread pool for each kind of work, so that no kind waits for another. Clients take turns."""

    def __init__(self) -> None:
        self._pools = {name: _Pool(name, count) for name, count in _THREADS.items()}

    async def run(self, pool: PoolName, client: str, work: Callable[[], T]) -> T:
        """Return the result of `work`. If cancelled, drop work that has not begun, and end the sandbox jobs of
        work that has."""
        threads = self._pools[pool]
        async with threads.turns.setdefault(client, asyncio.Lock()):
            await threads.free.acquire()
        abandoned = threading.Event()
        context = copy_context()
        context.run(ABANDONED.set, abandoned)
        future = threads.executor.submit(context.run, work)
        loop = asyncio.get_running_loop()
        # Release the thread when the work is done, not when this coroutine ends: cancelling does not stop a thread.
        future.add_done_callback(lambda _: threads.release_from_thread(loop))
        try:
            return await asyncio.wrap_future(future)
        finally:
            abandoned.set()

    def close(self) -> None:
        """Drop work that has not begun."""
        for pool in self._pools.values():
            pool.executor.shutdown(wait=False, cancel_futures=True)


class _Pool:
    """Threads for one kind of work. Used from the event loop only.

    Attributes:
        executor: The threads.
        free: Counts the threads that have no work.
        turns: Client -> its lock. A client waits for a thread only while it holds its lock. So each client has at most
            one place in the queue for threads.
    """

    def __init__(self, name: PoolName, count: int) -> None:
        self.executor = ThreadPoolExecutor(count, f"paceline-{name}", None if name == "short" else _lower_priority)
        self.free = asyncio.Semaphore(count)
        self.turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def release_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a thread as free. Called in that thread."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.free.release)


def _lower_priority() -> None:
    """Give this thread a lower priority than the engine's threads. Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def seconds_left(deadline: float) -> float | None:
    """Return the seconds until `deadline`, as `asyncio.wait_for` takes them."""
    return None if deadline == inf else max(0.0, deadline - time.monotonic())


async def cancel_on_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the client leaves first, cancel it and raise `ClientDisconnect`."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
