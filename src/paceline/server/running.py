"""The running replies of one request: their rounds in order of arrival, and what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from paceline.server.choices import ReplyRound
from paceline.server.errors import api_error
from paceline.server.limits import RequestLimit
from paceline.server.metrics import Metrics
from paceline.server.tracing import Tracer
from paceline.server.worker import ReplyJob, ReplyStream, RoundOutput, ServerStopping, Worker


@dataclass(slots=True)
class RunningReply:
    """One reply as far as its rounds have been read. Times are those of `time.perf_counter`.

    `first`: seconds from submission to the first token. `outcome`: set at the end to the finish reason, "error", or
    "abort" if the client left.
    """

    job: ReplyJob
    stream: ReplyStream
    submitted: float
    last_round: float
    first: float | None = None
    tokens: int = 0
    finish_reason: str | None = None
    outcome: str | None = None


@dataclass(slots=True)
class RunningRequest:
    """The replies to one request. `close` must follow `enter`, whatever happens between."""

    worker: Worker
    limit: RequestLimit
    metrics: Metrics
    tracer: Tracer
    replies: list[RunningReply] = field(default_factory=list)
    error: Exception | None = None
    open: bool = False

    def enter(self) -> None:
        """Count the request until `close`. Raises `ApiError` 429."""
        self.limit.acquire()
        self.open = True

    def start(self, jobs: Sequence[ReplyJob]) -> None:
        """Submit the jobs. If one is refused, `close` cancels the others. Raises `Busy`, `ServerStopping`."""
        for job in jobs:
            now = time.perf_counter()
            self.replies.append(RunningReply(job, self.worker.submit(job), now, now))

    def close(self) -> None:
        """Cancel replies that still run. Closing twice does nothing."""
        if not self.open:
            return
        self.open = False
        self.limit.release()
        for reply in self.replies:
            reply.stream.cancel()
            reply.outcome = reply.finish_reason or ("error" if self.error else "abort")
            self.metrics.observe_end(reply.outcome, time.perf_counter() - reply.submitted)
            self.tracer.record(reply.job, reply.stream, reply.first, reply.tokens, reply.outcome)

    async def rounds(self) -> AsyncIterator[ReplyRound]:
        """Yield the rounds of all replies as they come. The first error of one ends all, and is raised."""
        try:
            async for round_ in self._rounds_of(0) if len(self.replies) == 1 else self._merged():
                yield round_
        except Exception as error:
            self.error = error
            raise

    async def _rounds_of(self, index: int) -> AsyncIterator[ReplyRound]:
        reply = self.replies[index]
        async for output in reply.stream:
            yield self._round(index, output)
        if reply.finish_reason is None:
            raise ServerStopping

    async def _merged(self) -> AsyncIterator[ReplyRound]:
        queue: asyncio.Queue[ReplyRound | Exception | None] = asyncio.Queue(len(self.replies))
        readers = [asyncio.create_task(self._read_into(queue, index)) for index in range(len(self.replies))]
        left = len(readers)
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
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read_into(self, queue: asyncio.Queue[ReplyRound | Exception | None], index: int) -> None:
        try:
            async for round_ in self._rounds_of(index):
                await queue.put(round_)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    def _round(self, index: int, output: RoundOutput) -> ReplyRound:
        reply, now = self.replies[index], time.perf_counter()
        stream, seconds = reply.stream, now - reply.last_round
        round_ = ReplyRound(index, output.chunks, output.drafted, stream.drafter, 1000 * seconds)
        if reply.first is None:
            reply.first = now - reply.submitted
            self.metrics.observe_first(stream.queued, reply.first, len(reply.job.tokens), stream.stats.cached)
        else:
            self.metrics.observe_later(seconds, len(output.chunks))
        self.metrics.observe_round(round_)
        reply.last_round = now
        reply.tokens += 0 if reply.job.prompt_only else len(output.chunks)
        reply.finish_reason = output.chunks[-1].finish_reason
        return round_

    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts, and the statistics of speculation."""
        first_samples = [reply for reply in self.replies if reply.job.sample == 0]  # samples share their prompt
        prompt = sum(len(reply.job.tokens) for reply in first_samples)
        written = sum(reply.tokens for reply in self.replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(reply.stream.stats.cached for reply in first_samples)},
            "speculation": self._speculation(written),
        }

    def _speculation(self, written: int) -> dict[str, Any]:
        stats = [reply.stream.stats for reply in self.replies]
        rounds = sum(each.rounds for each in stats)
        accepted_at = [sum(counts) for counts in zip_longest(*(each.accepted_at for each in stats), fillvalue=0)]
        return {
            "rounds": rounds,
            "drafted": sum(each.drafted for each in stats),
            "accepted": sum(each.accepted for each in stats),
            "accepted_at": accepted_at,
            "drafter": self.replies[0].stream.drafter,
            "tokens_per_round": round(written / rounds, 4) if rounds else 0.0,
        }

    def error_event(self, error: Exception) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        self.error = error
        return api_error(error).body
