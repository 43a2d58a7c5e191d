"""Replicas of `paceline serve` on Ray Serve: `serve run paceline.integrations.ray:app model=demo`.

This needs the extra "ray". `Front` reads a request's body and sends it to the `Replica` that knows the beginning of its
prompt. A replica runs the same ASGI application as `paceline serve`, so routes, errors and streams are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from paceline.cli.commands import parsed
from paceline.cli.serve import ServedModels, ServerOptions, application
from paceline.errors import InvalidOption
from paceline.integrations.replica_streams import known, parts
from paceline.integrations.routing import Route, rank_replicas, route_of
from paceline.kernels.torch_variables import RUNNING
from paceline.server.bodies import BodyReader
from paceline.server.errors import ApiError, api_error
from paceline.server.limits import Settings, authorization, check_host, check_key
from paceline.server.listen import check_address
from paceline.server.preprocessing import MAX_SHORT_BODY, Preprocessor, client_id

_ATTEMPTS = 2
"""Number of replicas to try if they die before they begin to answer a request."""
_PAUSE = 0.02
"""Seconds between two parts of a stream. Each part costs processor time in three processes (benchmarks/replicas.py)."""
_UNSENT = 256
"""Maximum number of messages of an answer that wait for Ray."""
_NO_BODY = ("GET", "HEAD", "OPTIONS")


class PrefixRouter(RequestRouter):
    """Sends requests with the same beginning to the same replica."""

    @property
    def max_num_routing_tasks(self) -> int:
        """Number of waiting requests, which `max_queued_requests` limits.

        A request keeps its task while its replica is full, so fewer tasks would block other requests.
        """
        return int(self.num_pending_requests)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred group first."""
        route = Route()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # in case all of them are full
            route = pending_request.kwargs["route"]
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        loads = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas]
        return [[candidate_replicas[i] for i in group] for group in rank_replicas(route, names, loads.__getitem__)]


class Replica:
    """One server with its models, their workers and the application."""

    async def __init__(self, arguments: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._running, self._gauges = AsyncExitStack(), dict[str, Gauge]()
        context = parsed(application, arguments)
        self._served: ServedModels = context.command.invoke(context)
        await self._running.enter_async_context(self._served.app.router.lifespan_context(self._served.app))

    async def __del__(self) -> None:
        await self._running.aclose()

    async def check_health(self) -> None:
        """Report metrics. Raise an error if a worker has ended or fails, so that Serve replaces this replica."""
        if not self._served.models.alive:
            raise RuntimeError("a worker of this replica has ended; see its log")
        if self._served.models.failing:
            raise RuntimeError("the latest replies of this replica ended with internal errors; see its log")
        for name, labels, value in self._served.models.metrics.samples():
            name = name.replace(":", "_")  # Ray does not allow colons
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, "See /metrics of paceline serve.", tuple(labels))
            self._gauges[name].set(value, labels)

    async def answer(self, scope: dict[str, Any], body: bytes, route: Route) -> AsyncIterator[list[Message]]:
        """Yield the application's messages as they arrive. `PrefixRouter` reads `route`."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_UNSENT)
        unread, gone = [body], asyncio.Event()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop()}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if not gone.is_set():
                await sent.put(message)

        task = asyncio.ensure_future(self._served.app(scope, receive, send))
        task.add_done_callback(
            lambda _: None if sent.full() else sent.put_nowait(None)
        )  # a full queue wakes the reader anyway
        try:
            while not task.done() or not sent.empty():
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                if found := [message for message in messages if message]:
                    yield found
                if not task.done():
                    await asyncio.sleep(_PAUSE)
            await task
        finally:
            gone.set()
            while not sent.empty():  # the application may be waiting for room in the queue
                sent.get_nowait()
            await asyncio.wait([task])


class Front:
    """Reads requests, finds their replicas, and forwards the answers."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings) -> None:
        self._replicas, self._settings = replicas.options(stream=True), settings
        self._preprocessor = Preprocessor()
        self._bodies = BodyReader(self._preprocessor, settings)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        path = request.url.path
        try:
            if path == "/metrics":
                raise ApiError(404, "Ray's metrics ports have the metrics of all replicas", code="not_found")
            if request.method in _NO_BODY:  # the replica checks host and key where it is necessary
                stream, head = await self._begin(request, b"")
            else:
                check_host(self._settings.hosts, request.headers.get("host", ""))
                check_key(self._settings.api_keys, authorization(request.headers))
                async with self._bodies.receive(request) as (body, _):
                    stream, head = await self._begin(request, body)
        except Exception as error:  # `api_error` logs unexpected errors with their traceback
            return api_error(known(error)).response(path)
        start, *rest = head
        response = StreamingResponse(parts(stream, rest, path), start["status"])
        response.raw_headers = [pair for pair in start["headers"] if pair[0] != b"x-request-id"]  # Ray adds its own
        return response

    async def _route(self, request: Request, body: bytes) -> Route:
        work = partial(route_of, request.headers, body)
        return (
            work() if len(body) <= MAX_SHORT_BODY else await self._preprocessor.run("parse", client_id(request), work)
        )

    async def _begin(self, request: Request, body: bytes) -> tuple[Any, list[Message]]:
        """Start a replica's answer. If the replica dies, try another one, since the client has received nothing yet.

        Returns:
            The stream of the answer, and its first messages. These are all messages unless the answer is streamed.
        """
        sent = {name: value for name, value in request.scope.items() if isinstance(value, str | bytes | list | tuple)}
        route = await self._route(request, body)
        for left in reversed(range(_ATTEMPTS)):
            stream = self._replicas.answer.remote(scope=sent, body=body, route=route)
            try:
                head = await anext(stream)
                if any(name == b"content-length" for name, _ in head[0]["headers"]):
                    head += [message async for messages in stream for message in messages]
                return stream, head
            except RayActorError:
                if not left:
                    raise
            except asyncio.CancelledError:
                stream.cancel()
                raise
        raise AssertionError


def front_settings(given: Mapping[str, Any]) -> Settings:
    """Return the settings that `Front` checks before it reads a body.

    Args:
        given: All options of `paceline serve` by name.
    """
    who = ServerOptions(host=given["host"], api_key=given["api_key"], allowed_host=given["allowed_host"])
    hosts = who.hosts(check_address(who.host, 0))
    limits = {name: given[name] for name in ("max_body", "max_images", "max_image_bytes")}
    return Settings(tuple(who.api_key or ()), hosts, **limits)


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for `serve run` and `serve deploy`.

    Args:
        arguments: Options of `paceline serve` by name.

    Raises:
        InvalidOption: If an option is not valid or not supported on Ray.
    """
    if "record" in arguments:
        raise InvalidOption("several replicas cannot write one recording", "Leave out record")
    arguments = {**arguments, "port": 0}  # replicas do not listen on a port
    given = parsed(application, arguments).params
    replicas = serve.deployment(
        Replica,
        max_ongoing_requests=given["slots"],
        max_queued_requests=given["queue"],
        graceful_shutdown_timeout_s=given["grace"],
        autoscaling_config={"max_replicas": 8, "target_ongoing_requests": max(1, given["slots"] // 2)},
        request_router_config=RequestRouterConfig(request_router_class=f"{__name__}.{PrefixRouter.__name__}"),
        ray_actor_options={"runtime_env": {"env_vars": dict(RUNNING)}},
    )
    front = serve.deployment(Front, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
    return front.bind(replicas.bind(arguments), front_settings(given))
