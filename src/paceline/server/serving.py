"""From a planned request to its answer: a stream of events, or one JSON document."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from paceline.llm import LLM
from paceline.server import bodies, chat, completions, schema
from paceline.server.errors import LOG, REQUEST_ID
from paceline.server.events import DONE, EventStream, dumps, event
from paceline.server.limits import Gate, Settings
from paceline.server.metrics import Metrics
from paceline.server.running import Plan, Run, unless_gone
from paceline.server.tracing import Tracer, tracer
from paceline.server.words import Words
from paceline.server.worker import Worker

_GONE = 499
"""The client closed the connection: nobody sees this but the log."""


class Service:
    """What every route needs."""

    def __init__(self, worker: Worker, llm: LLM, settings: Settings) -> None:
        self.worker, self.llm, self.settings = worker, llm, settings
        _ = llm.exact  # a self-check that must not run beside the engine
        self.words = Words(llm.tokenizer)
        self.metrics = Metrics(settings.model, lambda: worker.load)
        self.tracer: Tracer = tracer(settings.model, settings.trace_endpoint)
        self.gate = Gate(settings.max_requests)

    async def chat(self, request: Request) -> Response:
        body = await bodies.read(request, schema.ChatRequest, self.settings.max_body)
        shape = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", self.settings.model)
        return await self._answer(request, body, shape, lambda: chat.plan(self.llm, self.settings, self.words, body))

    async def complete(self, request: Request) -> Response:
        body = await bodies.read(request, schema.CompletionRequest, self.settings.max_body)
        shape = Shape("cmpl-", "text_completion", "text_completion", self.settings.model)
        return await self._answer(
            request, body, shape, lambda: completions.plan(self.llm, self.settings, self.words, body)
        )

    async def _answer(self, request: Request, body: schema.Request, shape: Shape, plan: Callable[[], Plan]) -> Response:
        if self.settings.log_prompts:
            LOG.info("%s %s", REQUEST_ID.get(), body.model_dump_json(exclude_none=True))
        # Templates, tokenizers and grammars take their time: not on the event loop, where others are being served.
        planned = await asyncio.to_thread(plan)
        run = Run(self.worker, self.gate, self.metrics, self.tracer.of(request.headers))
        run.start([replace(job, client=_client(request)) for job in planned.jobs])
        answer = Answer(run, planned, shape)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(answer.events(usage), answer.close, self.settings.stall)
        try:
            whole = await unless_gone(answer.whole(), request.receive)
        finally:
            answer.close()
        return Response(status_code=_GONE) if whole is None else Response(dumps(whole), media_type="application/json")


def _client(request: Request) -> str:
    """Who asks: a key, or where there is none an address."""
    return request.headers.get("authorization") or (request.client.host if request.client else "")


@dataclass(frozen=True, slots=True)
class Shape:
    """What an endpoint's documents are called."""

    prefix: str
    whole: str
    chunk: str
    model: str


class Answer:
    """One request's answer in the making."""

    def __init__(self, run: Run, plan: Plan, shape: Shape) -> None:
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
            "%s %s %s: %d tokens to a prompt of %d, %d rounds",
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
