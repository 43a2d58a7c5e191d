"""A whole server in this process, and clients for it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
from fastapi.dependencies import utils

from paceline.learn.learner import Learner
from paceline.llm import LLM
from paceline.server.app import create_app
from paceline.server.limits import Settings
from paceline.server.models import Models, ModelSource, Pull
from paceline.server.worker import Worker, WorkerLimits, WorkerLoad
from tests.support.in_process import HOST, AppThread, AppTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


_inspected = utils.get_typed_signature
_SIGNATURES: dict[tuple[Any, bool], inspect.Signature] = {}


def _signature(handler: Callable[..., Any]) -> inspect.Signature:
    """Inspect each handler only once, because this takes a third of the time to create an application."""
    if not hasattr(handler, "__code__"):
        return _inspected(handler)
    key = handler.__code__, inspect.ismethod(handler)
    return _SIGNATURES.setdefault(key, _SIGNATURES.get(key) or _inspected(handler))


utils.get_typed_signature = _signature


@dataclass
class Serving:
    """A running server, and clients for it.

    `llm` and `worker` belong to the only model. `thread` is the thread of an application in this process.
    """

    client: httpx.Client
    thread: AppThread | None = None
    key: str = "none"
    llm: LLM = field(init=False)
    worker: Worker = field(init=False)

    @cached_property
    def address(self) -> str:
        """The server's URL, for clients with sockets of their own. The server listens from its first use."""
        port = self.client.base_url.port
        if port is None:
            assert self.thread
            port = self.thread.listen()
        return f"http://{HOST}:{port}"

    @cached_property
    def openai(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(
            base_url=self.client.base_url.join("/v1"), api_key=self.key, max_retries=0, http_client=self.client
        )

    @cached_property
    def openai_async(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.address}/v1", api_key=self.key, max_retries=0)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        sent = {"json": body} if body is not None else {}
        return self.client.post(path, **sent, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.client.request(method, path, **more)

    def idle(self) -> bool:
        """Return True if no request runs or waits, now or within 20 seconds."""
        return self._soon(lambda load: not load.running and not load.waiting)

    def busy(self) -> bool:
        """Return True if a request runs, now or within 20 seconds."""
        return self._soon(lambda load: load.running > 0)

    def _soon(self, reached: Callable[[WorkerLoad], bool]) -> bool:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if reached(self.worker.load):
                return True
            time.sleep(0.02)
        return False


@contextmanager
def serving(
    llm: LLM,
    limits: WorkerLimits | None = None,
    model: str = "toy",
    aliases: Sequence[str] = (),
    learner: Learner | None = None,
    **more: Any,
) -> Iterator[Serving]:
    """Serve one model until the block ends. `more` is as for `serving_models`."""
    worker = Worker(llm, limits, learner=learner)
    source = ModelSource((model, *aliases), lambda: worker, stays=True, adapters=tuple(llm.adapters))
    with serving_models([source], **more) as it:
        it.llm, it.worker = llm, worker
        yield it


@contextmanager
def serving_models(
    sources: Sequence[ModelSource], connections: int | None = None, pull: Pull | None = None, **settings: Any
) -> Iterator[Serving]:
    """Serve models until the block ends.

    Requests reach the application without a socket, unless `connections` is set: it is the maximum number of
    connections plus 1.
    """
    thread = AppThread(create_app(Models(sources, pull=pull), Settings(**settings)))
    try:
        with _client(thread, connections) as client:
            yield Serving(client, thread, *settings.get("api_keys", ())[:1])
    finally:
        thread.close()


def _client(thread: AppThread, connections: int | None) -> httpx.Client:
    if connections is None:
        return httpx.Client(base_url=f"http://{HOST}", transport=AppTransport(thread), timeout=60, trust_env=False)
    limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
    return httpx.Client(base_url=f"http://{HOST}:{thread.listen(connections)}", limits=limits, timeout=60)
