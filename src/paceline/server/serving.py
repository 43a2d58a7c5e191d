"""The service behind the routes: reads bodies, takes models, prepares requests in threads, runs their replies."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from paceline.errors import TimedOut
from paceline.server.answers import EventStream, RunningRequest
from paceline.server.api import Api, Body, dumps
from paceline.server.apis.chat_completions import ChatCompletions
from paceline.server.apis.completions import Completions
from paceline.server.apis.infill import Infill
from paceline.server.apis.messages import Messages
from paceline.server.apis.ollama import OllamaChat, OllamaGenerate
from paceline.server.apis.reading import PromptJobs
from paceline.server.apis.responses import Compaction, Responses
from paceline.server.apis.stored import ResponseStore
from paceline.server.bodies import BodyReader
from paceline.server.errors import LOG, REQUEST_ID
from paceline.server.images import without_images
from paceline.server.limits import RequestLimit, Settings, authorization, key_index
from paceline.server.models import LoadedModel, Models
from paceline.server.preprocessing import (
    PoolName,
    Preprocessor,
    cancel_on_disconnect,
    client_id,
    seconds_left,
)
from paceline.server.schema import NamedBody
from paceline.server.tracing import Tracer, tracer
from paceline.server.worker import ReplyJob

T = TypeVar("T")
Named = TypeVar("Named", bound=NamedBody)


class Service:
    """State shared by all routes.

    Attributes:
        loader: The models.
        settings: The configuration.
        tracer: Records traces of replies.
        limit: The limit on requests in progress.
        waiting: The limit on requests that wait for a model to be loaded.
        preprocessor: Runs work in threads.
        responses: Stored responses.
        bodies: Reads request bodies.
        apis: The APIs for generated text.
    """

    def __init__(self, models: Models, settings: Settings, apis: Sequence[Api[Any]] = ()) -> None:
        """Make a service with the server's own APIs and `apis`."""
        self.loader, self.settings = models, settings
        self.tracer: Tracer = tracer(settings.trace_endpoint)
        self.limit = RequestLimit(settings.max_requests)
        # At most half of all requests may wait, so that loaded models can still answer.
        self.waiting = RequestLimit(max(1, settings.max_requests // 2), "are already waiting for a model to be loaded")
        self.preprocessor = Preprocessor()
        self.responses = ResponseStore()
        self.bodies = BodyReader(self.preprocessor, settings)
        stored = self.responses, settings.max_body + settings.max_image_chars
        self.apis: Sequence[Api[Any]] = (
            *(ChatCompletions(), Completions(), Responses(*stored), Compaction(*stored), Messages()),
            *(OllamaChat(), OllamaGenerate(), Infill()),
            *apis,
        )

    def close(self) -> None:
        """Drop requests whose preparation has not begun, and send the traces that have not been sent."""
        self.preprocessor.close()
        self.tracer.close()

    async def generate(self, request: Request, api: Api[Body]) -> Response:
        """Answer a request for generated text."""
        arrived = time.monotonic()
        async with self.bodies.read(request, api.body, api.of_path(request.path_params)) as (body, pool):
            if (answer := api.without_reply(body)) is not None:
                self.loader.unload(body.model)
                return Response(dumps(answer), media_type="application/json")
            deadline = arrived + (body.timeout or self.settings.timeout or inf)
            prepare = partial(api.prepare, self.settings, body)
            pool = api.pool(body, pool)
            running, encoder = await self.start(request, body, pool, prepare, deadline, api.id_prefix)
            if api.unloads(body):
                self.loader.unload(body.model)
            stream = body.stream
        del body, prepare  # the body, which may be large, no longer counts
        if stream:
            return EventStream(running, encoder, self.settings)
        try:
            document = await cancel_on_disconnect(running.document(encoder), request.receive)
        finally:
            running.close()
        return Response(dumps(document), media_type="application/json")

    async def read_prompts(
        self, request: Request, kind: type[Named], prepare: Callable[[LoadedModel, Settings, Named], PromptJobs]
    ) -> Response:
        """Answer a request that only runs prompts through the model, such as a request for embeddings.

        `prepare` returns the jobs, and a function that makes the answer.
        """
        arrived = time.monotonic()
        deadline = arrived + (self.settings.timeout or inf)
        async with self.bodies.read(request, kind) as (body, pool):
            work = partial(_prompt_jobs, prepare, self.settings, body)
            running, answer = await self.start(request, body, pool, work, deadline)
        del body, work  # the body, which may be large, no longer counts

        def written() -> bytes:
            return dumps(answer(running.model.name, time.monotonic() - arrived))

        try:
            await cancel_on_disconnect(running.finish(), request.receive)
            data = await self.preprocess(request, "documents", written, seconds_left(deadline))
        finally:
            running.close()
        return Response(data, media_type="application/json")

    async def start(
        self,
        request: Request,
        body: NamedBody,
        pool: PoolName,
        prepare: Callable[[LoadedModel, str], tuple[Sequence[ReplyJob], T]],
        deadline: float,
        id_prefix: str = "",
    ) -> tuple[RunningRequest, T]:
        """Start the replies to a request. `RunningRequest.close` must follow. Raises the errors of `prepare`.

        Args:
            request: The request.
            body: Its body.
            pool: The pool that prepares it.
            prepare: Takes the model and the answer's id. Returns the jobs, and an object for the caller, such as the
                encoder of the answer.
            deadline: The time at which the request ends. Infinity for no limit.
            id_prefix: The beginning of the answer's id.
        """
        if self.settings.log_prompts:
            text = body.model_dump_json(exclude_none=True)
            LOG.info("%s %s", REQUEST_ID.get(), without_images(text) if body.image_chars else text)
        self.limit.acquire()
        try:
            model = await self._take(request, body.model, seconds_left(deadline))
        except BaseException:
            self.limit.release()
            raise
        trace = self.tracer.for_request(request.headers, model.name)
        name = id_prefix + uuid.uuid4().hex
        running = RunningRequest(name, model, self.limit, trace, logs_texts=self.settings.log_prompts)
        try:
            work = partial(prepare, model, running.id)
            jobs, made = await self.preprocess(request, pool, work, seconds_left(deadline))
            client, key = client_id(request), key_index(self.settings.api_keys, authorization(request.headers))
            own: dict[str, Any] = {"client": client, "key": key, "deadline": deadline, "adapter": model.adapter}
            running.start([replace(job, **own) for job in jobs])
        except BaseException:
            running.close()
            raise
        return running, made

    async def _take(self, request: Request, name: str | None, timeout: float | None) -> LoadedModel:
        """Return a model, and increment its user count: `release` must follow. Load the model first if needed.

        Raises `ApiError` 404, `ApiError` 429 if too many requests wait, `ClientDisconnect`, `TimedOut`, and the errors
        of loading.
        """
        while (model := self.loader.take(name)) is None:
            self.waiting.acquire()
            try:
                await self._unless_ended(request, self.loader.ready(name), timeout)
            finally:
                self.waiting.release()
        return model

    async def compute(
        self, request: Request, name: str | None, work: Callable[[LoadedModel], Any], pool: PoolName = "tokens"
    ) -> Response:
        """Answer with the result of `work`, for requests that generate nothing."""
        self.limit.acquire()
        try:
            model = await self._take(request, name, self.settings.timeout)
            try:
                return await self.document(request, partial(work, model), pool)
            finally:
                model.release()
        finally:
            self.limit.release()

    async def compute_from(
        self, request: Request, kind: type[Named], work: Callable[[LoadedModel, Settings, Named], Any]
    ) -> Response:
        """Answer with the result of `work` for a body, for requests that generate nothing."""
        async with self.bodies.read(request, kind) as (body, _):
            pool: PoolName = "images" if body.image_chars else "tokens"
            return await self.compute(request, body.model, lambda model: work(model, self.settings, body), pool)

    async def document(self, request: Request, work: Callable[[], Any], pool: PoolName = "documents") -> Response:
        """Answer with the result of `work`, which is JSON or is written as JSON."""

        def made() -> bytes:
            found = work()
            return found if isinstance(found, bytes) else dumps(found)

        data = await self.preprocess(request, pool, made, self.settings.timeout)
        return Response(data, media_type="application/json")

    async def preprocess(self, request: Request, pool: PoolName, work: Callable[[], T], timeout: float | None) -> T:
        """Run `work` in a thread. Raises the errors of `_unless_ended`."""
        return await self._unless_ended(request, self.preprocessor.run(pool, client_id(request), work), timeout)

    async def _unless_ended(self, request: Request, work: Coroutine[Any, Any, T], timeout: float | None) -> T:
        """Return the result of `work`. Cancel it and raise `ClientDisconnect` if the client disconnects, or `TimedOut`
        after `timeout` seconds."""
        try:
            return await cancel_on_disconnect(asyncio.wait_for(work, timeout), request.receive)
        except asyncio.TimeoutError:  # before Python 3.11, this is not the built-in TimeoutError
            raise TimedOut("the request timed out before its reply began", "Increase timeout") from None


def _prompt_jobs(
    prepare: Callable[[LoadedModel, Settings, Named], PromptJobs],
    settings: Settings,
    body: Named,
    model: LoadedModel,
    _: str,
) -> PromptJobs:
    return prepare(model, settings, body)
