"""A real server on 127.0.0.1, in a thread of the test's own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import uvicorn
from openai import AsyncOpenAI, OpenAI

from paceline.llm import LLM
from paceline.server.app import create_app
from paceline.server.limits import Settings
from paceline.server.listen import Connection
from paceline.server.models import Models, ModelSource, Pull
from paceline.server.worker import Worker, WorkerLimits


@dataclass
class Serving:
    """A server that runs, and clients for it. `llm`, `worker`: of the only model."""

    address: str
    key: str = "none"
    llm: LLM = field(init=False)
    worker: Worker = field(init=False)

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=self.key, max_retries=0)

    @property
    def openai_async(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.address}/v1", api_key=self.key, max_retries=0)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        sent = {"json": body} if body is not None else {}
        return httpx.post(self.address + path, timeout=60, **sent, **more)

    def request(self, method: str, path: str) -> httpx.Response:
        return httpx.request(method, self.address + path, timeout=60)

    def idle(self, seconds: float = 20) -> bool:
        """Whether nothing runs or waits, soon."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            load = self.worker.load
            if not load.running and not load.waiting:
                return True
            time.sleep(0.02)
        return False


@contextmanager
def serving(
    llm: LLM, limits: WorkerLimits | None = None, model: str = "toy", aliases: Sequence[str] = (), **more: Any
) -> Iterator[Serving]:
    """Serves one model until the block is left. `more`: as for `serving_models`."""
    worker = Worker(llm, limits)
    source = ModelSource((model, *aliases), lambda: worker, stays=True, adapters=tuple(llm.adapters))
    with serving_models([source], **more) as it:
        it.llm, it.worker = llm, worker
        yield it


@contextmanager
def serving_models(
    sources: Sequence[ModelSource], connections: int | None = None, pull: Pull | None = None, **settings: Any
) -> Iterator[Serving]:
    """Serves until the block is left. `connections`: how many there may be, less one."""
    app = create_app(Models(sources, pull=pull), Settings(**settings))
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        limit_concurrency=connections,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))

    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield Serving(f"http://127.0.0.1:{port}", *settings.get("api_keys", ())[:1])
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
