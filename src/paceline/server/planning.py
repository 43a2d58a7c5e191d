"""Threads that plan requests: templates, tokens, grammars. Off the event loop, and apart by how long that may take."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Literal, TypeVar

from paceline.sandbox import ABANDONED

T = TypeVar("T")
Lane = Literal["short", "long", "grammar"]
"""What is to be planned: a request with little text, one with much, one with a grammar."""

LONG = 1 << 16
"""Bytes of a body from which its text is long: it takes milliseconds to parse and more to tokenise."""

_THREADS: dict[Lane, int] = {"short": 2, "long": 1, "grammar": 2}


class Planning:
    """A few threads for each kind of work, so that one kind never waits for another."""

    def __init__(self) -> None:
        self._pools = {
            lane: ThreadPoolExecutor(count, f"paceline-{lane}", None if lane == "short" else _yield_to_others)
            for lane, count in _THREADS.items()
        }

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        """Return what `work` returns. Cancelled, it drops work that has not begun and ends jobs of the sandbox."""
        abandoned = threading.Event()
        context = copy_context()
        context.run(ABANDONED.set, abandoned)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools[lane], context.run, work)
        finally:
            abandoned.set()

    def close(self) -> None:
        """Drop what has not begun."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _yield_to_others() -> None:
    """Let the engine's threads go first on the processor. Linux has a priority for each thread; others do not."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
