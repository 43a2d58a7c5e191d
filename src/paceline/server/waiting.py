"""Deadlines, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


def after(began: float, timeout: float | None) -> float | None:
    """Return the time at which `timeout` seconds have passed; None: never."""
    return None if timeout is None else began + timeout


def left(deadline: float | None) -> float | None:
    """Return the seconds until `deadline`; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what `work` returns. If the client leaves before, cancel it and raise `ClientDisconnect`."""

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
