"""Answers to requests for generated text: their running replies, and what these become: one JSON document, or a stream
of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from paceline.server.choices import PreparedRequest
from paceline.server.errors import LOG, REQUEST_ID, api_error
from paceline.server.limits import RequestLimit
from paceline.server.models import LoadedModel
from paceline.server.tracing import Tracer
from paceline.server.worker import ReplyHandle, ReplyJob, ReplyRound, ServerStopping


@dataclass(slots=True)
class RunningReply:
    """One reply as far as its rounds have been read. Times are those of `time.perf_counter`.

    `first`: seconds from submission to the first token. `outcome`: set at the end to the finish reason, "error", or
    "abort" if the client left.
    """

    job: ReplyJob
    handle: ReplyHandle
    submitted: float
    first: float | None = None
    tokens: int = 0
    finish_reason: str | None = None
    outcome: str | None = None


@dataclass(slots=True)
class RunningRequest:
    """The replies to one request, which uses `model` and counts against `limit` until `close`. `id`: its answer's."""

    id: str
    model: LoadedModel
    limit: RequestLimit
    tracer: Tracer
    replies: list[RunningReply] = field(default_factory=list)
    outputs: asyncio.Queue[ReplyRound] = field(default_factory=asyncio.Queue)
    error: Exception | None = None
    open: bool = True

    def start(self, jobs: Sequence[ReplyJob]) -> None:
        """Submit the jobs. If one is refused, `close` cancels the others. Raises `Busy`, `ServerStopping`."""
        for index, job in enumerate(jobs):
            now = time.perf_counter()
            self.replies.append(RunningReply(job, self.model.worker.submit(job, self.outputs, index), now))

    def close(self) -> None:
        """Cancel replies that still run, and log the usage. Closing twice does nothing."""
        if not self.open:
            return
        self.open = False
        self.limit.release()
        self.model.release()
        for reply in self.replies:
            reply.handle.cancel()
            reply.outcome = reply.finish_reason or ("error" if self.error else "abort")
            self.model.metrics.observe_end(reply.outcome, time.perf_counter() - reply.submitted)
            self.tracer.record(reply.job, reply.handle, reply.first, reply.tokens, reply.outcome)
        if self.replies:
            usage = self.usage()
            LOG.info(
                "%s %s %s: completion tokens %d, prompt tokens %d, rounds %d",
                REQUEST_ID.get(),
                self.id,
                ",".join(str(reply.outcome) for reply in self.replies),
                usage["completion_tokens"],
                usage["prompt_tokens"],
                usage["speculation"]["rounds"],
            )

    async def rounds(self) -> AsyncIterator[ReplyRound]:
        """Yield the rounds of all replies as they come. The first error of one ends all, and is raised."""
        running = len(self.replies)
        try:
            while running:
                round_ = await self.outputs.get()
                reply = self.replies[round_.index]
                if round_.chunks:
                    self._count(reply, round_)
                    yield round_
                if round_.over:
                    running -= 1
                    if reply.handle.error or reply.finish_reason is None:
                        raise reply.handle.error or ServerStopping()
        except Exception as error:
            self.error = error
            raise

    def _count(self, reply: RunningReply, round_: ReplyRound) -> None:
        self.model.metrics.observe_round(round_, reply.first is None)
        if reply.first is None:
            reply.first, handle = time.perf_counter() - reply.submitted, reply.handle
            self.model.metrics.observe_first(handle.queued, reply.first, len(reply.job.tokens), handle.stats.cached)
        reply.tokens += 0 if reply.job.prompt_only else len(round_.chunks)
        reply.finish_reason = round_.chunks[-1].finish_reason

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts, and the statistics of speculation."""
        first_samples = [reply for reply in self.replies if reply.job.sample == 0]  # samples share their prompt
        prompt = sum(len(reply.job.tokens) for reply in first_samples)
        written = sum(reply.tokens for reply in self.replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(reply.handle.stats.cached for reply in first_samples)},
            **self._predicted(),
            "speculation": self._speculation(written),
        }

    def _predicted(self) -> dict[str, Any]:
        """What the replies have of a prediction, and what they do not; nothing where there was none."""
        stats = [reply.handle.stats for reply in self.replies]
        predicted, accepted = sum(s.predicted for s in stats), sum(s.confirmed for s in stats)
        if not predicted:
            return {}
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        return {"completion_tokens_details": details}

    def _speculation(self, written: int) -> dict[str, Any]:
        stats = [reply.handle.stats for reply in self.replies]
        rounds = sum(each.rounds for each in stats)
        accepted_at = [sum(counts) for counts in zip_longest(*(each.accepted_at for each in stats), fillvalue=0)]
        return {
            "rounds": rounds,
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
            "accepted_at": accepted_at,
            "drafter": self.replies[0].handle.drafter,
            "tokens_per_round": round(written / rounds, 4) if rounds else 0.0,
        }


class GeneratedAnswer:
    """The answer to one request for generated text."""

    def __init__(self, running: RunningRequest, prepared: PreparedRequest) -> None:
        # Not the request itself, which holds its body.
        self._running, self._document, self._event = running, prepared.document, prepared.event
        self._choices = [prepared.choice(index) for index in range(len(prepared.jobs))]
        self._created = int(time.time())
        self.close = running.close

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        running = self._running
        head = {"id": running.id, "object": kind, "created": self._created, "model": running.model.name}
        return {**head, "choices": choices, **more}

    async def document(self) -> dict[str, Any]:
        """Return the finished answer. Raises the error that ended a reply early."""
        async for round_ in self._running.rounds():
            self._choices[round_.index].add_round(round_)
        choices = [choice.as_dict() for choice in self._choices]
        return self._object(self._document, choices, usage=self._running.usage())

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        """Yield the answer as it grows. An error is an event too, because the status has been sent by then."""
        more: dict[str, Any] = {"usage": None} if usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(self._object(self._event, [choice], **more))

        try:
            for choice in self._choices:
                if first := choice.first_event():
                    yield chunk(first)
            async for round_ in self._running.rounds():
                for content in self._choices[round_.index].add_round(round_):
                    yield chunk(content)
            if usage:
                yield event(self._object(self._event, [], usage=self._running.usage()))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            self._running.error = error
            yield event(api_error(error).body)
        finally:
            self.close()


def event(data: Mapping[str, Any]) -> bytes:
    """Return an event with this JSON."""
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream(StreamingResponse):
    """Response that streams events.

    `close` is called at the end in any case: the stream was read to its end, dropped by the client, or left unread for
    `stall` seconds. By then the unread part fills the socket's buffer and no more.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], stall: float) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"},
        )
        self._close, self._stall = close, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""

        async def send_within_limit(message: Message) -> None:
            with anyio.fail_after(self._stall):
                await send(message)

        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_within_limit)
        finally:
            self._close()
