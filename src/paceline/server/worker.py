"""The engine's thread, and replies as the event loop sees them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass
from math import inf

from paceline.engine.detokenizer import Chunk
from paceline.engine.draft_policy import Speculation
from paceline.engine.engine import Request
from paceline.engine.prompt_logprobs import PromptLogprobs
from paceline.engine.scheduler import Begin, Event, Scheduler, Task
from paceline.engine.stats import Stats
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.server.memory import give_back

_log = logging.getLogger("paceline.serve")

_REST = 1.0
"""Seconds without any work after which memory that nobody uses is given back."""


class Busy(PacelineError):
    """So many wait already that another one is turned away. `retry`: seconds after which to ask again."""

    retry = 1


class ServerStopping(PacelineError):
    """The server is stopping."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the worker holds at most. `slots`: replies that share rounds. `queue`: replies that wait. `cache`: positions
    of keys and values, slots times the longest text. `quota`: prompt tokens fed between two rounds.
    `prefixes`: bytes for beginnings of texts that may come again."""

    slots: int = 32
    queue: int = 128
    cache: int = 1 << 20
    quota: int = 128
    prefixes: int = 0


@dataclass(frozen=True, slots=True)
class ReplyJob:
    """A reply to be made. `tokens`: the prompt's ids. `sampling`: with a seed. `sample`: which of several samples.
    `speculation`: None is the server's default. `timeout`: seconds from now. `group`: jobs that share a prompt.
    `client`: who asks; those who wait get seats in turn. `scores` takes the prompt's log-probabilities. `shown`:
    whether the reply is wanted, or the prompt alone. `held`: kept alive until the reply begins."""

    tokens: Sequence[int]
    sampling: Sampling
    sample: int = 0
    speculation: Speculation | None = None
    timeout: float | None = None
    group: Hashable | None = None
    client: Hashable | None = None
    scores: PromptLogprobs | None = None
    shown: bool = True
    held: object = None


@dataclass(frozen=True, slots=True)
class Load:
    """`cache`: the part of the memory for keys and values that texts fill, 0 to 1."""

    running: int
    waiting: int
    cache: float


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """Tokens that one reply gained in one round. `drafted`: tokens proposed in it, accepted or not."""

    chunks: Sequence[Chunk]
    drafted: int


class ReplyStream:
    """A job's reply as it grows. For the event loop that submitted it, and one reader."""

    def __init__(self, task: Task, wake: asyncio.Event) -> None:
        self._task, self._wake = task, wake
        self._ready: deque[RoundOutput] = deque()
        self._drafted = 0
        self._over = False
        self._nothing = Stats(0, "rounding")

    @property
    def stats(self) -> Stats:
        """As of now; of nothing as long as it waits for a slot."""
        return self._task.request.stats if self._task.request else self._nothing

    @property
    def queued(self) -> float:
        """Seconds that it waited for a slot, or has waited by now."""
        return (self._task.began or time.monotonic()) - self._task.came

    @property
    def cached(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.stats.cached

    @property
    def drafter(self) -> str | None:
        """The name of the one that drafts for it."""
        policy = self._task.request.policy if self._task.request else None
        return policy.name if policy else None

    @property
    def error(self) -> Exception | None:
        """Why it ended early, once it has."""
        return self._task.error if self._over else None

    def cancel(self) -> None:
        """Nobody waits for it any more: it ends before its next round."""
        self._task.cancelled = True

    def push(self, chunks: Sequence[Chunk], drafted: int, over: bool) -> None:
        """Add a round's chunks. `drafted`: tokens proposed in all rounds up to this one; `over`: it was the last."""
        if chunks:
            self._ready.append(RoundOutput(chunks, drafted - self._drafted))
            self._drafted = drafted
        self._over = self._over or over
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[RoundOutput]:
        """Yield each round. Raises the error that ended the reply early; leaving before the end cancels it."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._ready:
                    yield self._ready.popleft()
                if self._over:
                    break
            if self._task.error:
                raise self._task.error
        finally:
            if not self._over:
                self.cancel()


class Worker:
    """Runs a model's rounds in a thread of its own, and hands each reply its chunks on the event loop.

    What happens in one round reaches the loop in one call. A reply that fails ends alone; should the scheduler itself
    fail, those it held end with that error and it begins anew.
    """

    def __init__(self, llm: LLM, seats: WorkerLimits | None = None, default: Speculation | None = None) -> None:
        """`default`: how replies are drafted for that do not say it; None: by the engine's own first drafter."""
        self.llm, self.seats = llm, seats or WorkerLimits()
        self.default = default or llm.engine.policies.default
        if self.seats.prefixes:
            llm.engine.remember(self.seats.prefixes)
        self._scheduler = self._new_scheduler()
        self._inbox: deque[Task] = deque()
        self._replies: dict[Task, ReplyStream] = {}
        self._held: set[Task] = set()
        """What the engine's thread has taken in and not handed over whole."""
        self._news = threading.Condition()
        self._stopping = False
        self._ends_at = inf
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # For the event loop

    def start(self) -> None:
        """Call it from the running event loop that replies are read on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def load(self) -> Load:
        running = len(self._scheduler.active)
        return Load(running, max(0, len(self._replies) - running), self._filled())

    def submit(self, job: ReplyJob) -> ReplyStream:
        """Raises `Busy`, `ServerStopping`, and `InvalidOption` for a drafter that is not loaded or a bad sampling."""
        if self._stopping:
            raise ServerStopping("the server is stopping", "Ask another one, or wait until it is back")
        if len(self._replies) >= self.seats.slots + self.seats.queue:
            raise Busy(f"{len(self._replies)} replies run or wait already", "Ask again in a moment")
        how = job.speculation or self.default
        _ = self.llm.engine.policies[how.drafter]
        task = Task(self._begin(job, how), len(job.tokens), job.group, job.client)
        if job.timeout is not None:
            task.deadline = time.monotonic() + job.timeout
        reply = ReplyStream(task, asyncio.Event())
        self._replies[task] = reply
        with self._news:
            self._inbox.append(task)
            self._news.notify()
        return reply

    def drain(self, grace: float) -> None:
        """Take no more replies. Those there are may finish within `grace` seconds; then they are cancelled."""
        with self._news:
            self._stopping, self._ends_at = True, min(self._ends_at, time.monotonic() + grace)
            self._news.notify()

    async def stop(self, grace: float) -> None:
        """`drain`, and wait until the thread has ended."""
        self.drain(grace)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _begin(self, job: ReplyJob, how: Speculation) -> Begin:
        def begin(like: Request | None) -> Request:
            return self.llm.start(job.tokens, job.sampling, job.sample, like, how, job.scores)

        return begin

    def _deliver(self, events: Sequence[tuple[Task, list[Chunk], int, bool]]) -> None:
        for task, chunks, drafted, over in events:
            reply = self._replies[task]
            if over:
                del self._replies[task]
            reply.push(chunks, drafted, over)

    # The engine's thread

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                events = self._scheduler.turn()
            except Exception as error:
                _log.exception("a round broke off")
                events = self._start_over(error)
            self._hand_over(events)
        self._hand_over(self._start_over(None))

    def _wait_for_work(self) -> bool:
        """Take what has come in; sleep while there is nothing to do. False when it is time to end."""
        if not self._sleep(_REST):
            give_back()
            self._sleep(None)
        with self._news:
            while self._inbox:
                task = self._inbox.popleft()
                self._held.add(task)
                self._scheduler.add(task)
        return time.monotonic() < self._ends_at if self._scheduler.busy else not self._stopping

    def _sleep(self, most: float | None) -> bool:
        """Until there is something to do, or for so many seconds; whether there is."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._inbox) or self._scheduler.busy or self._stopping, most)

    def _hand_over(self, events: Sequence[Event]) -> None:
        self._held.difference_update(task for task, _ in events if task.done)
        if events and self._loop and not self._loop.is_closed():
            # Read the counts here: by the time the event loop runs, the engine may be some rounds ahead.
            news = [(task, chunks, _drafted(task), task.done) for task, chunks in events]
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _start_over(self, error: Exception | None) -> list[Event]:
        """Ends every reply there is, those too that a turn which broke off had ended and could not hand over."""
        try:
            self._scheduler.close()
        except Exception:
            _log.exception("replies could not be ended in order")
        self._scheduler = self._new_scheduler()
        for task in self._held:
            task.error, task.done = task.error or error, True
        return [(task, []) for task in self._held]

    # Memory

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.llm.engine, self.seats.slots, self.seats.quota, self._fits)

    def _fits(self, count: int, longest: int) -> bool:
        return _positions(count, longest) <= self.seats.cache

    def _filled(self) -> float:
        active = self._scheduler.active
        return min(1.0, _positions(len(active), max((t.length for t in active), default=0)) / self.seats.cache)


def _drafted(task: Task) -> int:
    return task.request.stats.drafted if task.request else 0


def _positions(count: int, longest: int) -> int:
    """A cache has as many positions for each text as for the longest, and doubles the texts that it has room for."""
    return longest << max(0, count - 1).bit_length() if count else 0
