"""The service behind the routes: from a request to a stream of events or one JSON document."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from paceline.errors import TimedOut
from paceline.llm import LLM
from paceline.server import chat, completions, options, schema
from paceline.server.bodies import BodyReader
from paceline.server.choices import PreparedRequest, TokenTexts
from paceline.server.errors import LOG, REQUEST_ID
from paceline.server.events import DONE, EventStream, dumps, event
from paceline.server.grammar_trials import GrammarTrials
from paceline.server.limits import RequestLimit, Settings
from paceline.server.metrics import Metrics
from paceline.server.preprocessing import PoolName, Preprocessor, client_of
from paceline.server.running import RunningRequest
from paceline.server.tracing import Tracer, tracer
from paceline.server.worker import Worker

T = TypeVar("T")
Body = TypeVar("Body", bound=schema.RequestBody)
Prepare = Callable[[LLM, Settings, TokenTexts, GrammarTrials, Body], PreparedRequest]


class Service:
    """State shared by all routes."""

    def __init__(self, worker: Worker, llm: LLM, settings: Settings) -> None:
        self.worker, self.llm, self.settings = worker, llm, settings
        _ = llm.guarantee  # its self-check must not run beside the engine
        self.token_texts = TokenTexts(llm.tokenizer)
        self.metrics = Metrics(settings.model, lambda: worker.load)
        self.tracer: Tracer = tracer(settings.model, settings.trace_endpoint)
        self.limit = RequestLimit(settings.max_requests)
        self.grammar_trials = GrammarTrials(llm)
        self.preprocessor = Preprocessor()
        self.bodies = BodyReader(self.preprocessor, settings.max_body, settings.max_bodies)

    def close(self) -> None:
        """Drop requests that are being prepared, and send the last traces."""
        self.preprocessor.close()
        self.tracer.close()

    async def chat(self, request: Request) -> Response:
        """Answer a request for a chat completion."""
        endpoint = Endpoint("chatcmpl-", "chat.completion", "chat.completion.chunk")
        return await self._generate(request, schema.ChatRequest, chat.prepare, endpoint)

    async def complete(self, request: Request) -> Response:
        """Answer a request for a text completion."""
        endpoint = Endpoint("cmpl-", "text_completion", "text_completion")
        return await self._generate(request, schema.CompletionRequest, completions.prepare, endpoint)

    async def compute(self, request: Request, work: Callable[[], Any]) -> Response:
        """Answer with the JSON of what `work` returns, for requests that generate nothing."""
        self.limit.acquire()
        try:
            data = await self._preprocess(request, "tokens", lambda: dumps(work()), self.settings.timeout)
            return Response(data, media_type="application/json")
        finally:
            self.limit.release()

    async def _preprocess(self, request: Request, pool: PoolName, work: Callable[[], T], timeout: float | None) -> T:
        """Run `work` in a thread. Ends it and raises `ClientDisconnect` when the client leaves, `TimedOut` after
        `timeout` seconds."""
        run = asyncio.wait_for(self.preprocessor.run(pool, client_of(request), work), timeout)
        try:
            return await _unless_disconnected(run, request.receive)
        except asyncio.TimeoutError:  # another class until Python 3.11
            raise TimedOut("the request timed out before its reply began", "Increase timeout") from None

    async def _generate(
        self, request: Request, kind: type[Body], prepare: Prepare[Body], endpoint: Endpoint
    ) -> Response:
        answer, events = await self._begin(request, kind, prepare, endpoint)
        if events is not None:
            return EventStream(events, answer.close, self.settings.stall)
        try:
            document = await _unless_disconnected(answer.document(), request.receive)
        finally:
            answer.close()
        return Response(dumps(document), media_type="application/json")

    async def _begin(
        self, request: Request, kind: type[Body], prepare: Prepare[Body], endpoint: Endpoint
    ) -> tuple[Answer, AsyncIterator[bytes] | None]:
        """Start the replies. Returns the answer, and its events if it is to be streamed.

        The body, which may be large, is released when this returns, and not when the replies end.
        """
        arrived = time.monotonic()
        async with self.bodies.read(request, kind) as (body, pool):
            if self.settings.log_prompts:
                LOG.info("%s %s", REQUEST_ID.get(), body.model_dump_json(exclude_none=True))
            timeout = self.settings.timeout if body.timeout is None else body.timeout

            def left() -> float | None:
                return None if timeout is None else max(0.0, arrived + timeout - time.monotonic())

            running = RunningRequest(self.worker, self.limit, self.metrics, self.tracer.for_request(request.headers))
            running.enter()
            try:
                work = partial(prepare, self.llm, self.settings, self.token_texts, self.grammar_trials, body)
                prepared = await self._preprocess(request, options.pool(body, pool), work, left())
                remaining = left()
                running.start([replace(job, client=client_of(request), timeout=remaining) for job in prepared.jobs])
                answer = Answer(running, prepared, endpoint, self.settings.model)
            except BaseException:
                running.close()
                raise
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return answer, answer.events(usage) if body.stream else None


async def _unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Names in an endpoint's documents: the ids' prefix, and the object types of a document and of an event."""

    id_prefix: str
    document: str
    event: str


class Answer:
    """The answer to one request for generated text."""

    def __init__(self, running: RunningRequest, prepared: PreparedRequest, endpoint: Endpoint, model: str) -> None:
        self._running, self._endpoint, self._model = running, endpoint, model
        self._choices = [prepared.choice(index) for index in range(len(prepared.jobs))]
        self._id, self._created = f"{endpoint.id_prefix}{uuid.uuid4().hex}", int(time.time())

    def close(self) -> None:
        """Cancel replies that still run, and log the usage. Closing twice does nothing."""
        if not self._running.open:
            return
        self._running.close()
        usage = self._running.usage()
        LOG.info(
            "%s %s %s: completion tokens %d, prompt tokens %d, rounds %d",
            REQUEST_ID.get(),
            self._id,
            ",".join(str(reply.outcome) for reply in self._running.replies),
            usage["completion_tokens"],
            usage["prompt_tokens"],
            usage["speculation"]["rounds"],
        )

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    async def document(self) -> dict[str, Any]:
        """Return the finished answer. Raises the error that ended a reply early."""
        async for round_ in self._running.rounds():
            self._choices[round_.index].add_round(round_)
        choices = [choice.as_dict() for choice in self._choices]
        return self._object(self._endpoint.document, choices, usage=self._running.usage())

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        """Yield the answer as it grows. An error is an event too, because the status has been sent by then."""
        more: dict[str, Any] = {"usage": None} if usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(self._object(self._endpoint.event, [choice], **more))

        try:
            for choice in self._choices:
                if first := choice.first_event():
                    yield chunk(first)
            async for round_ in self._running.rounds():
                for content in self._choices[round_.index].add_round(round_):
                    yield chunk(content)
            if usage:
                yield event(self._object(self._endpoint.event, [], usage=self._running.usage()))
            yield DONE
        except Exception as error:
            yield event(self._running.error_event(error))
        finally:
            self.close()
