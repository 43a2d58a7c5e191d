"""One request's replies as they are written: their rounds in the order of arrival, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.engine.detokenizer import Chunk
from paceline.server.errors import api_error
from paceline.server.limits import Gate
from paceline.server.metrics import Metrics
from paceline.server.tracing import Tracer
from paceline.server.worker import ReplyJob, ReplyStream, RoundOutput, ServerStopping, Worker


@dataclass(frozen=True, slots=True)
class ReplyRound:
    """What one reply gained in one round. `drafted`: tokens proposed in it. `ms`: since its last one."""

    index: int
    chunks: Sequence[Chunk]
    drafted: int
    drafter: str | None
    ms: float

    @property
    def accepted(self) -> int:
        return sum(chunk.origin == "draft" for chunk in self.chunks)

    def as_dict(self) -> dict[str, Any]:
        return {"drafted": self.drafted, "accepted": self.accepted, "ms": round(self.ms, 3)}


class GrowingChoice(Protocol):
    """One reply as a client is to see it, growing round by round."""

    def opening(self) -> dict[str, Any] | None:
        """The first event of a stream, if there is something to show."""

    def take(self, round_: ReplyRound, /) -> list[dict[str, Any]]:
        """Takes a round in. Returns its events; the one that says why the reply ended has nothing else to show."""

    def whole(self) -> dict[str, Any]:
        """The reply as it is now, in one piece."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request, understood: what to write, and what to make of it."""

    jobs: Sequence[ReplyJob]
    choice: Callable[[int], GrowingChoice]


@dataclass(slots=True)
class ReplyProgress:
    """One reply, as far as it has been shown."""

    job: ReplyJob
    reply: ReplyStream
    submitted: float
    last: float
    first: float | None = None
    tokens: int = 0
    finish: str | None = None
    outcome: str | None = None
    """Why it ended, "error", or "abort" where its client left; once it is over."""


@dataclass(slots=True)
class RequestRun:
    """The replies to one request. `close` must follow `enter`, whatever happens between."""

    worker: Worker
    gate: Gate
    metrics: Metrics
    tracer: Tracer
    replies: list[ReplyProgress] = field(default_factory=list)
    error: Exception | None = None
    open: bool = False

    def enter(self) -> None:
        """Take a place at the gate; `close` gives it back. Raises `ApiError` 429."""
        self.gate.enter()
        self.open = True

    def start(self, jobs: Sequence[ReplyJob]) -> None:
        """Submit the jobs. If one is refused, `close` cancels the others. Raises `Busy`, `ServerStopping`."""
        for job in jobs:
            now = time.perf_counter()
            self.replies.append(ReplyProgress(job, self.worker.submit(job), now, now))

    def close(self) -> None:
        """Cancels what still runs; closing twice does nothing."""
        if not self.open:
            return
        self.open = False
        self.gate.leave()
        for progress in self.replies:
            progress.reply.cancel()
            progress.outcome = progress.finish or ("error" if self.error else "abort")
            self.metrics.finished(progress.outcome, time.perf_counter() - progress.submitted)
            self.tracer.replied(progress.job, progress.reply, progress.first, progress.tokens, progress.outcome)

    async def rounds(self) -> AsyncIterator[ReplyRound]:
        """Every round of every reply, as they come. The first failure of one ends all, and is raised."""
        try:
            async for made in self._rounds_of(0) if len(self.replies) == 1 else self._merged():
                yield made
        except Exception as error:
            self.error = error
            raise

    async def _rounds_of(self, index: int) -> AsyncIterator[ReplyRound]:
        progress = self.replies[index]
        async for output in progress.reply:
            yield self._round(index, output)
        if progress.finish is None:
            raise ServerStopping("the server is stopping", "Ask another one, or wait until it is back")

    async def _merged(self) -> AsyncIterator[ReplyRound]:
        queue: asyncio.Queue[ReplyRound | Exception | None] = asyncio.Queue(len(self.replies))
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self.replies))]
        left = len(pumps)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int, queue: asyncio.Queue[ReplyRound | Exception | None]) -> None:
        try:
            async for made in self._rounds_of(index):
                await queue.put(made)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    def _round(self, index: int, output: RoundOutput) -> ReplyRound:
        progress, now = self.replies[index], time.perf_counter()
        ms = 1000 * (now - progress.last)
        made = ReplyRound(index, output.chunks, output.drafted, progress.reply.drafter, ms)
        self._count(progress, made, now)
        progress.last = now
        progress.tokens += len(output.chunks) if progress.job.shown else 0
        progress.finish = output.chunks[-1].finish_reason
        return made

    def _count(self, progress: ReplyProgress, made: ReplyRound, now: float) -> None:
        reply = progress.reply
        if progress.first is None:
            progress.first = now - progress.submitted
            self.metrics.first(reply.queued, progress.first, len(progress.job.tokens), reply.cached)
        else:
            self.metrics.later(now - progress.last, len(made.chunks))
        speculated = made.chunks[0].origin != "plain"
        self.metrics.round(speculated, made.drafted, made.accepted, len(made.chunks))

    @property
    def cached(self) -> int:
        return sum(progress.reply.cached for progress in self._first_of_each_prompt())

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts, and what speculation gave."""
        prompt = sum(len(progress.job.tokens) for progress in self._first_of_each_prompt())
        written = sum(progress.tokens for progress in self.replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "speculation": self._speculation(written),
        }

    def _first_of_each_prompt(self) -> list[ReplyProgress]:
        """Samples of one prompt share it: it is counted once."""
        return [progress for progress in self.replies if progress.job.sample == 0]

    def _speculation(self, written: int) -> dict[str, Any]:
        stats = [progress.reply.stats for progress in self.replies]
        rounds = sum(one.rounds for one in stats)
        depth = max((len(one.accepted_at) for one in stats), default=0)
        at = [sum(one.accepted_at[d] for one in stats if d < len(one.accepted_at)) for d in range(depth)]
        return {
            "rounds": rounds,
            "drafted": sum(one.drafted for one in stats),
            "accepted": sum(one.accepted for one in stats),
            "accepted_at": at,
            "drafter": self.replies[0].reply.drafter,
            "tokens_per_round": round(written / rounds, 4) if rounds else 0.0,
        }

    def told(self, error: Exception) -> dict[str, Any]:
        """The error event of a stream."""
        self.error = error
        return api_error(error).body


async def until_gone(receive: Any) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Any, receive: Any) -> Any:
    """What `work` (a coroutine) returns; None if the client leaves before, which ends it."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
