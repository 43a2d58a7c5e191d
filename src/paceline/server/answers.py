"""Requests in progress, and their answers: one JSON document, or a stream of events."""

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

from paceline.engine.stats import Divergence
from paceline.server.api import Encoder, Event
from paceline.server.errors import LOG, REQUEST_ID, api_error
from paceline.server.limits import RequestLimit, Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import Usage
from paceline.server.tracing import Tracer
from paceline.server.worker import ReplyHandle, ReplyJob, ReplyRound, ServerStopping

_MAX_LOGGED_CHARACTERS = 40
"""Maximum characters of a text that the log quotes."""
_PROGRESS_SECONDS = 0.5
"""Minimum seconds between two events that report the progress of a prompt."""


@dataclass(slots=True)
class RunningRequest:
    """A request in progress. It uses the model and counts against the limit until `close`.

    Attributes:
        id: The id of the answer.
        model: The model. `close` releases it.
        limit: The limit on concurrent requests. `close` releases its place.
        tracer: Records the replies.
        handles: The handles of the replies, one for each job.
        outputs: Rounds that the worker has delivered, and that `rounds` has not taken yet.
        error: The error that ended the replies. None if there was none.
        open: False after `close`.
        logs_texts: True if the log may contain texts.
    """

    id: str
    model: LoadedModel
    limit: RequestLimit
    tracer: Tracer
    handles: list[ReplyHandle] = field(default_factory=list)
    outputs: asyncio.Queue[ReplyRound] = field(default_factory=asyncio.Queue)
    error: Exception | None = None
    open: bool = True
    logs_texts: bool = False

    def start(self, jobs: Sequence[ReplyJob]) -> None:
        """Submit the jobs. If a job is refused, call `close`, which cancels the jobs submitted before it.

        Raises `Busy` and `ServerStopping`.
        """
        for index, job in enumerate(jobs):
            self.handles.append(self.model.worker.submit(job, self.outputs, index))

    def close(self) -> None:
        """Cancel unfinished replies, release the model and the place in the limit, and log the usage.

        A second call does nothing.
        """
        if not self.open:
            return
        self.open = False
        self.limit.release()
        self.model.release()
        for handle in self.handles:
            handle.cancel()
            handle.outcome = handle.engine_reason or ("error" if self.error else "abort")
            self.model.metrics.observe_end(handle.outcome, handle.seconds)
            self.tracer.record(handle)
        if self.handles:
            usage = self.usage()
            self.model.metrics.observe_draft_failures(sum(stats.draft_failures for stats in usage.stats))
            LOG.info(
                "%s %s %s: completion tokens %d, prompt tokens %d, rounds %d",
                REQUEST_ID.get(),
                self.id,
                ",".join(str(handle.outcome) for handle in self.handles),
                usage.written,
                usage.prompt,
                usage.rounds,
            )

    async def rounds(self, pause: float = math.inf) -> AsyncGenerator[ReplyRound | None, None]:
        """Yield the rounds of all replies as they arrive, and None after every `pause` seconds without a round.

        If a reply fails, all replies end and its error is raised.
        """
        running = len(self.handles)
        try:
            while running:
                round_ = None
                with anyio.move_on_after(pause):
                    round_ = await self.outputs.get()
                if round_ is None:
                    yield None
                    continue
                handle = self.handles[round_.index]
                if round_.chunks:
                    self._count(handle, round_)
                    yield round_
                if round_.is_last:
                    running -= 1
                    if not handle.job.sampling.max_new_tokens and not handle.error:
                        handle.engine_reason = "length"  # a reply of 0 tokens has no chunk to report its finish reason
                        self._count_first(handle)
                    if handle.error or handle.engine_reason is None:
                        raise handle.error or ServerStopping()
        except Exception as error:
            self.error = error
            raise

    def stop(self) -> None:
        """Cancel all replies. The finish reason of those that have none becomes "stop", as after a stop string."""
        for handle in self.handles:
            handle.engine_reason = handle.engine_reason or "stop"
            handle.cancel()

    async def finish(self) -> None:
        """Wait until all replies have ended. Raises the error of the first reply that fails."""
        async for _ in self.rounds():
            pass

    async def document(self, encoder: Encoder) -> dict[str, Any]:
        """Return the finished answer. Raises the error that ended a reply early."""
        async for _ in self._events_of_rounds(encoder):
            pass
        encoder.end(self.usage())
        return encoder.document(self.usage())

    async def events(self, encoder: Encoder, heartbeat: float) -> AsyncIterator[bytes]:
        """Yield the answer as it grows. Errors are events, because the status of the response has already been sent.

        After `heartbeat` to twice `heartbeat` seconds of silence, an event without content is sent, because clients and
        proxies give up on a silent stream. A comment is not enough, because some clients ignore comments. A client that
        asked for the progress of its prompt gets an event every `_PROGRESS_SECONDS` until the first token.
        """
        encode = encoder.encode
        pause = min(heartbeat, _PROGRESS_SECONDS) if encoder.shows_progress else heartbeat
        try:
            for event in encoder.begin(self.usage()):
                yield encode(event)
            spoken = time.monotonic()
            async for events in self._events_of_rounds(encoder, pause):
                begun = any(handle.first is not None for handle in self.handles)
                if not events and time.monotonic() - spoken >= (heartbeat if begun else pause):
                    reading = encoder.shows_progress and not begun
                    events = [encoder.progress(self.usage()) if reading else encoder.heartbeat()]
                for event in events:
                    yield encode(event)
                    spoken = time.monotonic()
            for event in encoder.end(self.usage()):
                yield encode(event)
            yield encoder.last
        except Exception as error:  # `api_error` logs unexpected ones with their traceback
            self.error = error
            yield encode(encoder.failed(api_error(error)))
        finally:
            self.close()

    async def _events_of_rounds(self, encoder: Encoder, pause: float = math.inf) -> AsyncIterator[Sequence[Event]]:
        """Add each round to the answer, and yield its events. After `pause` seconds without a round, yield an empty
        sequence."""
        async with aclosing(self.rounds(pause)) as rounds:
            async for round_ in rounds:
                yield encoder.add(round_) if round_ else ()
                if encoder.is_complete:
                    self.stop()
                    return

    def _count(self, handle: ReplyHandle, round_: ReplyRound) -> None:
        self.model.metrics.observe_round(round_, handle.first is None)
        self._count_first(handle)
        handle.tokens += 0 if handle.job.prompt_only else len(round_.chunks)
        handle.engine_reason = round_.chunks[-1].finish_reason

    def _count_first(self, handle: ReplyHandle) -> None:
        if handle.first is None:
            handle.first = handle.seconds
            prompt, stats = handle.job.prompt_tokens, handle.stats
            self.model.metrics.observe_first(handle.queued, handle.first, prompt, stats.cached, stats.from_disk)
            if stats.diverged:
                LOG.info("%s %s", REQUEST_ID.get(), self._reason(stats.diverged, stats.cached))

    def _reason(self, diverged: Divergence, cached: int) -> str:
        """Return a line for the log that explains why the prefix hit ends where it does."""
        line = f"prompt diverged at token {diverged.at:,} of {diverged.length:,} of an earlier text, {cached:,} reused"
        if not self.logs_texts:
            return line
        ours, theirs = (
            self.model.llm.tokenizer.decode(one)[:_MAX_LOGGED_CHARACTERS] for one in (diverged.ours, diverged.theirs)
        )
        return f"{line}: {ours!r} instead of {theirs!r}"

    def usage(self) -> Usage:
        """Return the counts so far."""
        first_samples = [handle for handle in self.handles if handle.job.sample == 0]  # samples share their prompt
        return Usage(
            prompt=sum(handle.job.prompt_tokens for handle in first_samples),
            written=sum(handle.tokens for handle in self.handles),
            stats=[handle.stats for handle in self.handles],
            cached=sum(handle.stats.cached for handle in first_samples),
            drafter=self.handles[0].drafter if self.handles else None,
            queued=min((handle.queued for handle in self.handles), default=0.0),
            first=min((handle.first or 0.0 for handle in self.handles), default=0.0),
            total=max((handle.seconds for handle in self.handles), default=0.0),
            read=sum(handle.read for handle in first_samples),
        )


class EventStream(StreamingResponse):
    """Response that streams events.

    `RunningRequest.close` is always called: at the end of the stream, when the client disconnects, or when the client
    has read nothing for `stall` seconds. By then, the client has received everything except what the socket buffers.
    """

    def __init__(self, running: RunningRequest, encoder: Encoder, settings: Settings) -> None:
        super().__init__(
            running.events(encoder, settings.heartbeat),
            media_type=encoder.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"},
        )
        self._close, self._stall = running.close, settings.stall

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
