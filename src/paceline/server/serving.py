"""From a planned request to its answer: a stream of events, or one JSON document."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.errors import TimedOut
from paceline.llm import LLM
from paceline.server import chat, completions, options, schema
from paceline.server.bodies import Bodies
from paceline.server.errors import LOG, REQUEST_ID
from paceline.server.events import DONE, EventStream, dumps, event
from paceline.server.grammar_trials import Trials
from paceline.server.limits import Gate, Settings
from paceline.server.metrics import Metrics
from paceline.server.planning import Lane, Planning, client_of
from paceline.server.running import RequestPlan, RequestRun, unless_gone
from paceline.server.token_text import TokenTexts
from paceline.server.tracing import Tracer, tracer
from paceline.server.worker import Worker

T = TypeVar("T")
Asked = TypeVar("Asked", bound=schema.RequestBody)
Planner = Callable[[LLM, Settings, TokenTexts, Trials, Asked], RequestPlan]


class Service:
    """What every route needs."""

    def __init__(self, worker: Worker, llm: LLM, settings: Settings) -> None:
        self.worker, self.llm, self.settings = worker, llm, settings
        _ = llm.guarantee  # a self-check that must not run beside the engine
        self.words = TokenTexts(llm.tokenizer)
        self.metrics = Metrics(settings.model, lambda: worker.load)
        self.tracer: Tracer = tracer(settings.model, settings.trace_endpoint)
        self.gate = Gate(settings.max_requests)
        self.trials = Trials(llm)
        self.planning = Planning()
        self.bodies = Bodies(self.planning, settings.max_body, settings.max_bodies)

    def close(self) -> None:
        """Drop requests that are being planned, and send the last traces."""
        self.planning.close()
        self.tracer.close()

    async def chat(self, request: Request) -> Response:
        shape = DocumentNames("chatcmpl-", "chat.completion", "chat.completion.chunk", self.settings.model)
        return await self._answer(request, schema.ChatRequest, chat.plan, shape)

    async def complete(self, request: Request) -> Response:
        shape = DocumentNames("cmpl-", "text_completion", "text_completion", self.settings.model)
        return await self._answer(request, schema.CompletionRequest, completions.plan, shape)

    async def aside(self, request: Request, work: Callable[[], bytes]) -> Response:
        """The JSON that `work` makes, where that is not a reply of the model's."""
        self.gate.enter()
        try:
            return Response(
                await self.planned(request, "tokens", work, self.settings.timeout), media_type="application/json"
            )
        finally:
            self.gate.leave()

    async def planned(self, request: Request, lane: Lane, work: Callable[[], T], timeout: float | None) -> T:
        """Return what `work` returns, in a thread. End it, raising `ClientDisconnect`, when the client leaves, and
        `TimedOut` after `timeout` seconds."""
        planning = asyncio.wait_for(self.planning.run(lane, client_of(request), work), timeout)
        try:
            done = await unless_gone(planning, request.receive)
        except asyncio.TimeoutError:  # another class until Python 3.11
            raise TimedOut("the request timed out before its reply began", "Give it longer") from None
        if done is None:
            raise ClientDisconnect
        return cast(T, done)

    async def _answer(
        self, request: Request, kind: type[Asked], plan: Planner[Asked], shape: DocumentNames
    ) -> Response:
        answer, events = await self._begin(request, kind, plan, shape)
        if events is not None:
            return EventStream(events, answer.close, self.settings.stall)
        try:
            whole = await unless_gone(answer.whole(), request.receive)
        finally:
            answer.close()
        if whole is None:
            raise ClientDisconnect
        return Response(dumps(whole), media_type="application/json")

    async def _begin(
        self, request: Request, kind: type[Asked], plan: Planner[Asked], shape: DocumentNames
    ) -> tuple[PendingAnswer, AsyncIterator[bytes] | None]:
        """Return the answer, and its events where it is to be streamed. The body, which may be large, and what was made
        of it end here, and not with the reply."""
        arrived = time.monotonic()
        async with self.bodies.read(request, kind) as (body, given):
            if self.settings.log_prompts:
                LOG.info("%s %s", REQUEST_ID.get(), body.model_dump_json(exclude_none=True))
            timeout = self.settings.timeout if body.timeout is None else body.timeout
            run = RequestRun(self.worker, self.gate, self.metrics, self.tracer.of(request.headers))
            run.enter()
            try:
                work = partial(plan, self.llm, self.settings, self.words, self.trials, body)
                planned = await self.planned(request, options.lane(body, given), work, _left(arrived, timeout))
                left = _left(arrived, timeout)
                run.start([replace(job, client=client_of(request), timeout=left) for job in planned.jobs])
                answer = PendingAnswer(run, planned, shape)
            except BaseException:
                run.close()
                raise
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return answer, answer.events(usage) if body.stream else None


def _left(arrived: float, timeout: float | None) -> float | None:
    """Seconds that a request still has."""
    return None if timeout is None else max(0.0, arrived + timeout - time.monotonic())


@dataclass(frozen=True, slots=True)
class DocumentNames:
    """What an endpoint's documents are called."""

    prefix: str
    whole: str
    chunk: str
    model: str


class PendingAnswer:
    """One request's answer in the making."""

    def __init__(self, run: RequestRun, plan: RequestPlan, shape: DocumentNames) -> None:
        self._run, self._shape = run, shape
        self._choices = [plan.choice(index) for index in range(len(plan.jobs))]
        self._id, self._created = f"{shape.prefix}{uuid.uuid4().hex}", int(time.time())

    def close(self) -> None:
        """Cancels what still runs, and says in the log what there was. Closing twice does nothing."""
        if not self._run.open:
            return
        self._run.close()
        used = self._run.usage()
        LOG.info(
            "%s %s %s: completion tokens %d, prompt tokens %d, rounds %d",
            REQUEST_ID.get(),
            self._id,
            ",".join(str(progress.outcome) for progress in self._run.replies),
            used["completion_tokens"],
            used["prompt_tokens"],
            used["speculation"]["rounds"],
        )

    def _document(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._shape.model}
        return {**head, "choices": choices, **more}

    async def whole(self) -> dict[str, Any]:
        """The finished answer. Raises what ended a reply early."""
        async for made in self._run.rounds():
            self._choices[made.index].take(made)
        choices = [choice.whole() for choice in self._choices]
        return self._document(self._shape.whole, choices, usage=self._run.usage())

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        """The answer as it grows. A failure is an event too: the status has been sent by then."""
        more: dict[str, Any] = {"usage": None} if usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(self._document(self._shape.chunk, [choice], **more))

        try:
            for choice in self._choices:
                if first := choice.opening():
                    yield chunk(first)
            async for made in self._run.rounds():
                for shown in self._choices[made.index].take(made):
                    yield chunk(shown)
            if usage:
                yield event(self._document(self._shape.chunk, [], usage=self._run.usage()))
            yield DONE
        except Exception as error:
            yield event(self._run.told(error))
        finally:
            self.close()
