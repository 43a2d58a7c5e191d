"""Answers to requests for generated text: their running replies, and what these become: one JSON document, or a stream
of server-sent events."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from paceline.server.errors import LOG, REQUEST_ID, api_error
from paceline.server.limits import RequestLimit
from paceline.server.models import LoadedModel
from paceline.server.tracing import Tracer
from paceline.server.usage import Usage
from paceline.server.worker import ReplyHandle, ReplyJob, ReplyRound, ServerStopping
from paceline.server.writers import Event, Writer


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
            self.model.metrics.observe_draft_failures(sum(stats.draft_failures for stats in usage.stats))
            LOG.info(
                "%s %s %s: completion tokens %d, prompt tokens %d, rounds %d",
                REQUEST_ID.get(),
                self.id,
                ",".join(str(reply.outcome) for reply in self.replies),
                usage.written,
                usage.prompt,
                usage.rounds,
            )

    async def rounds(self, pause: float = math.inf) -> AsyncGenerator[ReplyRound | None, None]:
        """Yield the rounds of all replies as they come, and None after each `pause` seconds without one.

        The first error of one reply ends all, and is raised.
        """
        running = len(self.replies)
        try:
            while running:
                round_ = None
                with anyio.move_on_after(pause):
                    round_ = await self.outputs.get()
                if round_ is None:
                    yield None
                    continue
                reply = self.replies[round_.index]
                if round_.chunks:
                    self._count(reply, round_)
                    yield round_
                if round_.over:
                    running -= 1
                    if not reply.job.sampling.max_new_tokens and not reply.handle.error:
                        reply.finish_reason = "length"  # without a token there was no round to say so
                        self._count_first(reply)
                    if reply.handle.error or reply.finish_reason is None:
                        raise reply.handle.error or ServerStopping()
        except Exception as error:
            self.error = error
            raise

    def stop(self) -> None:
        """End all replies as a stop string does."""
        for reply in self.replies:
            reply.finish_reason = reply.finish_reason or "stop"
            reply.handle.cancel()

    async def finish(self) -> None:
        """Wait until all replies are over. Raises the first error of one."""
        async for _ in self.rounds():
            pass

    def _count(self, reply: RunningReply, round_: ReplyRound) -> None:
        self.model.metrics.observe_round(round_, reply.first is None)
        self._count_first(reply)
        reply.tokens += 0 if reply.job.prompt_only else len(round_.chunks)
        reply.finish_reason = round_.chunks[-1].finish_reason

    def _count_first(self, reply: RunningReply) -> None:
        if reply.first is None:
            reply.first, handle = time.perf_counter() - reply.submitted, reply.handle
            self.model.metrics.observe_first(handle.queued, reply.first, reply.job.prompt_tokens, handle.stats.cached)

    def usage(self) -> Usage:
        """Counts so far."""
        first_samples = [reply for reply in self.replies if reply.job.sample == 0]  # samples share their prompt
        began = min((reply.submitted for reply in self.replies), default=time.perf_counter())
        return Usage(
            prompt=sum(reply.job.prompt_tokens for reply in first_samples),
            written=sum(reply.tokens for reply in self.replies),
            stats=[reply.handle.stats for reply in self.replies],
            cached=sum(reply.handle.stats.cached for reply in first_samples),
            drafter=self.replies[0].handle.drafter if self.replies else None,
            queued=min((reply.handle.queued for reply in self.replies), default=0.0),
            first=min((reply.first or 0.0 for reply in self.replies), default=0.0),
            total=time.perf_counter() - began,
        )


class GeneratedAnswer:
    """The answer to one request for generated text, in the shape that its writer gives it.

    A stream that has been silent for `heartbeat` seconds, or at most twice that, gets an event without content: clients
    and proxies give up a stream without events, and some do not count comments.
    """

    def __init__(self, running: RunningRequest, writer: Writer, heartbeat: float) -> None:
        # Not the request itself, which holds its body.
        self._running, self._writer, self._heartbeat = running, writer, heartbeat
        self.media_type = writer.media_type
        self.close = running.close

    async def document(self) -> dict[str, Any]:
        """Return the finished answer. Raises the error that ended a reply early."""
        async for _ in self._growth():
            pass
        self._writer.end(self._running.usage())
        return self._writer.document(self._running.usage())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as it grows. An error is an event too, because the status has been sent by then."""
        encode = self._writer.encode
        try:
            for event in self._writer.begin(self._running.usage()):
                yield encode(event)
            spoken = time.monotonic()
            async for events in self._growth(self._heartbeat):
                if not events and time.monotonic() - spoken >= self._heartbeat:
                    events = [self._writer.heartbeat()]
                for event in events:
                    yield encode(event)
                    spoken = time.monotonic()
            for event in self._writer.end(self._running.usage()):
                yield encode(event)
            yield self._writer.last
        except Exception as error:
            self._running.error = error
            yield encode(self._writer.failed(api_error(error)))
        finally:
            self.close()

    async def _growth(self, pause: float = math.inf) -> AsyncIterator[Sequence[Event]]:
        """Add the rounds as they come, and yield the events of each; none after `pause` seconds without a round."""
        async with aclosing(self._running.rounds(pause)) as rounds:
            async for round_ in rounds:
                yield self._writer.add(round_) if round_ else ()
                if self._writer.over:
                    self._running.stop()
                    return


class EventStream(StreamingResponse):
    """Response that streams events.

    The answer is closed at the end in any case: the stream was read to its end, dropped by the client, or left unread
    for `stall` seconds. By then the unread part fills the socket's buffer and no more.
    """

    def __init__(self, answer: GeneratedAnswer, stall: float) -> None:
        super().__init__(
            answer.events(),
            media_type=answer.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"},
        )
        self._close, self._stall = answer.close, stall

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
