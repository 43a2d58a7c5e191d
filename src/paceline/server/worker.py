"""The engine's thread, and the handles with which the event loop follows its replies."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from paceline.cache.slots import SlotTable
from paceline.cache.state import max_states
from paceline.engine.detokenizer import Chunk
from paceline.engine.draft_policy import Speculation
from paceline.engine.prompt_logprobs import PromptReader
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, Task, TaskOutput
from paceline.engine.stats import Stats
from paceline.errors import PacelineError
from paceline.learn.learner import Learner
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.vision.prompt import ImagePrompt

_log = logging.getLogger("paceline.serve")

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
"""The engine's finish reasons -> OpenAI's."""
_FAILURES = 3
"""Replies in a row that end with an internal error before the worker counts as failing."""
_LAST_SECONDS = 4.0
"""Minimum seconds for writing the prefix cache to its folder when the server stops."""
_IDLE_TRIM = 1.0
"""Seconds without work after which free memory is returned to the system."""


class Busy(PacelineError):
    """The server has no room for another request now."""

    def __init__(self, cause: str, fix: str = "Try again in a moment") -> None:
        super().__init__(cause, fix)


class ServerStopping(PacelineError):
    """The server is stopping."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", "Use another server, or retry once this one is back")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Capacity of a worker.

    Attributes:
        slots: Maximum replies in a batch.
        queue: Maximum replies that wait for a slot.
        cache_positions: Maximum positions in the key-value cache, over all texts.
        prefill_quota: Maximum prompt tokens that are prefilled between two rounds.
        prefix_bytes: Maximum bytes of the prefix cache. 0 disables it, and None leaves the LLM's own cache unchanged.
        state_positions: Number of cache positions that take as much memory as one recurrent state. 0 for models without
            recurrent states.
    """

    slots: int = 32
    queue: int = 128
    cache_positions: int = 1 << 20
    prefill_quota: int = 128
    prefix_bytes: int | None = None
    state_positions: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplyJob:
    """One reply to generate.

    Attributes:
        tokens: The prompt's token ids.
        sampling: The sampling parameters, with a seed.
        sample: The index among several samples of the prompt.
        speculation: The drafter and its budget. None for the server's default.
        deadline: The time at which the reply ends, as `time.monotonic` counts.
        group: A key that is equal for jobs with the same prompt.
        client: The client. Waiting clients get slots in turn.
        key: Index of the client's API key. What the server learns is shared only by clients with the same key.
        scores: Collects log-probabilities or hidden states of the prompt.
        prompt_only: True if the generated tokens are not returned.
        adapter: The name of a LoRA adapter.
        keep_alive: An object to hold until the reply begins.
        padding: Number of tokens at the end of `tokens` that are not the client's.
    """

    tokens: Sequence[int]
    sampling: Sampling
    sample: int = 0
    speculation: Speculation | None = None
    deadline: float = inf
    group: Hashable | None = None
    client: Hashable | None = None
    key: int = 0
    scores: PromptReader | None = None
    prompt_only: bool = False
    adapter: str | None = None
    keep_alive: object = None
    padding: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the client sent it."""
        return len(self.tokens) - self.padding


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker.

    Attributes:
        running: Replies that are running.
        waiting: Replies that are waiting.
        cache: The share of the key-value cache in use, 0 to 1.
        disk: Size of the prefix cache's folder, in bytes.
    """

    running: int
    waiting: int
    cache: float
    disk: int = 0


@dataclass(frozen=True, slots=True)
class ReplyRound:
    """One round of a reply.

    Attributes:
        index: The reply's index, as passed to `submit`.
        chunks: The tokens of the round. The last round may have none.
        drafted: Number of tokens that the drafter proposed.
        drafter: The drafter's name. None for plain decoding.
        ms: Milliseconds since the previous round, or since submission.
        is_last: True for the last round.
    """

    index: int
    chunks: Sequence[Chunk]
    drafted: int
    drafter: str | None
    ms: float
    is_last: bool = False

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(chunk.drafted for chunk in self.chunks)

    @property
    def text(self) -> str:
        """The text of all its chunks."""
        return "".join(chunk.text for chunk in self.chunks)


class ReplyHandle:
    """A submitted job, and the state of its reply. Use it only on the event loop that submitted the job.

    first: Seconds from submission until the event loop read the first token. None before that.
    tokens: Number of the reply's tokens that the event loop has read.
    engine_reason: The engine's finish reason, once the reply has ended.
    outcome: The engine's finish reason at the end, "error", or "abort" if the client left.
    """

    def __init__(self, job: ReplyJob, task: Task, outputs: asyncio.Queue[ReplyRound], index: int) -> None:
        self.job, self._task, self._outputs, self._index = job, task, outputs, index
        self._submitted = self._last = time.perf_counter()
        self._drafted = 0
        self._no_stats = Stats(0, "rounding")
        self.first: float | None = None
        self.tokens = 0
        self.engine_reason: str | None = None
        self.outcome: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds since submission."""
        return time.perf_counter() - self._submitted

    @property
    def stats(self) -> Stats:
        """Statistics so far, which the engine's thread may be updating; empty until the reply has a slot."""
        return self._task.request.stats if self._task.request else self._no_stats

    @property
    def queued(self) -> float:
        """Seconds spent waiting for a slot so far."""
        return (self._task.started or time.monotonic()) - self._task.arrived

    @property
    def read(self) -> int:
        """Tokens of the prompt read so far, including those from the prefix cache."""
        return max(0, self.job.prompt_tokens - self._task.unread)

    @property
    def drafter(self) -> str | None:
        """Name of the drafter, None for plain decoding."""
        policy = self._task.request.policy if self._task.request else None
        return policy.name if policy else None

    @property
    def error(self) -> Exception | None:
        """The error that ended the reply early. Valid once the reply has ended."""
        return self._task.error

    def cancel(self) -> None:
        """End the reply before its next round."""
        self._task.cancelled = True

    def push(self, chunks: Sequence[Chunk], drafted: int, is_last: bool) -> None:
        """Add a round. `drafted`: tokens proposed in all rounds up to this one."""
        now = time.perf_counter()
        ms = 1000 * (now - self._last)
        self._outputs.put_nowait(ReplyRound(self._index, chunks, drafted - self._drafted, self.drafter, ms, is_last))
        self._drafted, self._last = drafted, now


class Worker:
    """Runs a model's rounds in a thread of its own and delivers each reply's chunks on the event loop.

    All results of one round reach the loop in one call. A reply that fails does not end the others. If the scheduler
    itself fails, the replies it held end with that error and a new scheduler takes over.
    """

    def __init__(
        self,
        llm: LLM,
        limits: WorkerLimits | None = None,
        default: Speculation | None = None,
        learner: Learner | None = None,
    ) -> None:
        """Make a worker.

        Args:
            llm: The model.
            limits: Its capacity.
            default: Speculation of a job if neither the job nor its adapter sets it. None: the first drafter.
            learner: Learns from the replies, and chooses the speculation of jobs that set none. `stop` closes it.
        """
        self.learner = learner
        self.llm, self.limits = llm, limits or WorkerLimits()
        self.default = default or llm.engine.policies.default
        if self.limits.prefix_bytes is not None:
            llm.engine.remember(self.limits.prefix_bytes)
        cache = llm.engine.cache
        rectangle = isinstance(cache, SlotTable) and cache.rectangle
        self._positions = partial(_positions, self.limits.state_positions, rectangle)
        self._scheduler = self._new_scheduler()
        self._inbox: deque[Task] = deque()
        self._replies: dict[Task, ReplyHandle] = {}
        self._unfinished: set[Task] = set()
        """Tasks that the engine's thread has taken from the inbox and whose end it has not delivered."""
        self._failures = 0
        """Replies in a row that ended with an internal error."""
        self._changed = threading.Condition()
        self._stopping = False
        self._ends_at = inf
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # Called on the event loop

    def start(self) -> None:
        """Start the thread. Replies are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self.learner:
            self.learner.start(lambda: bool(self._replies))

    @property
    def alive(self) -> bool:
        """True if jobs are accepted."""
        return self._thread.is_alive() and not self._stopping

    @property
    def failing(self) -> bool:
        """True if the latest replies all ended with an internal error, until a reply succeeds."""
        return self._failures >= _FAILURES

    @property
    def load(self) -> WorkerLoad:
        """The load at this moment."""
        active = self._scheduler.active
        positions = self._positions([task.length for task in active])
        waiting = max(0, len(self._replies) - len(active))
        prefixes = self.llm.engine.prefixes
        disk = prefixes.disk.nbytes if prefixes is not None and prefixes.disk else 0
        return WorkerLoad(len(active), waiting, min(1.0, positions / self.limits.cache_positions), disk)

    def default_for(self, adapter: str | None) -> Speculation:
        """Return the speculation of jobs with this adapter that set none."""
        return self.llm.speculation(adapter) if self.llm.adapters.get(adapter or "") else self.default

    def submit(self, job: ReplyJob, outputs: asyncio.Queue[ReplyRound], index: int = 0) -> ReplyHandle:
        """Queue a job. Its outputs will have this index.

        Raises `Busy`, `ServerStopping`, and `InvalidOption` for a drafter that is not loaded.
        """
        if self._stopping:
            raise ServerStopping
        if len(self._replies) >= self.limits.slots + self.limits.queue:
            raise Busy(f"the server is full: {len(self._replies)} replies are running or waiting")
        learner = self.learner
        if learner:
            learner.interrupt()
        speculation = job.speculation or (learner.speculation(job.key) if learner else self.default_for(job.adapter))
        _ = self.llm.engine.policies[speculation.drafter]

        def begin(like: Request | None) -> Request:
            how = (job.sample, like, speculation, job.scores, job.adapter)
            request = self.llm.start(job.tokens, job.sampling, *how)
            # Skip prompts with images: a recording lacks the images, so its hidden states would differ from the real
            # ones.
            if learner and job.sampling.max_new_tokens and not (job.prompt_only or isinstance(job.tokens, ImagePrompt)):
                learner.watch(job.key, request, job.sampling, job.sample)
            return request

        task = Task(begin, job.tokens, job.group, job.client, job.deadline, unread=len(job.tokens))
        reply = ReplyHandle(job, task, outputs, index)
        self._replies[task] = reply
        with self._changed:
            self._inbox.append(task)
            self._changed.notify()
        return reply

    def drain(self, grace: float) -> None:
        """Accept no more jobs. Unfinished replies have `grace` seconds to end; then they are cancelled."""
        with self._changed:
            self._stopping, self._ends_at = True, min(self._ends_at, time.monotonic() + grace)
            self._changed.notify()

    async def stop(self, grace: float) -> None:
        """`drain`, and wait until the thread has ended."""
        self.drain(grace)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        if self.learner:
            await asyncio.get_running_loop().run_in_executor(None, self.learner.close)

    def _deliver(self, rounds: Sequence[tuple[Task, list[Chunk], int, bool]]) -> None:
        for task, chunks, drafted, is_last in rounds:
            reply = self._replies.pop(task) if is_last else self._replies[task]
            reply.push(chunks, drafted, is_last)

    # Called on the engine's thread

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                outputs = self._scheduler.turn()
            except Exception as error:
                _log.exception("the scheduler failed")
                outputs = self._start_over(error)
            self._hand_over(outputs)
        self._hand_over(self._start_over(None))
        try:
            self.llm.engine.save_prefixes(max(_LAST_SECONDS, self._ends_at - time.monotonic()))
        except Exception:
            _log.exception("saving the prefix cache failed")

    def _wait_for_work(self) -> bool:
        """Pass new tasks to the scheduler. Sleep while there is no work. Return False when the thread must end."""
        if not self._sleep(_IDLE_TRIM):
            trim_memory()
            self._sleep(None)
        with self._changed:
            while self._inbox:
                task = self._inbox.popleft()
                self._unfinished.add(task)
                self._scheduler.add(task)
        return time.monotonic() < self._ends_at if self._scheduler.busy else not self._stopping

    def _sleep(self, timeout: float | None) -> bool:
        """Wait for work or a stop. Returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._inbox) or self._scheduler.busy or self._stopping, timeout)

    def _hand_over(self, outputs: Sequence[TaskOutput]) -> None:
        ended = [task for task, _ in outputs if task.done]
        self._unfinished.difference_update(ended)
        for task in ended:
            self._count(task)
        if outputs and self._loop and not self._loop.is_closed():
            # Read the counts here: by the time the event loop runs, the engine may be some rounds ahead.
            rounds = [(task, chunks, _drafted(task), task.done) for task, chunks in outputs]
            self._loop.call_soon_threadsafe(self._deliver, rounds)

    def _count(self, task: Task) -> None:
        """Count replies that failed because of the engine, but not errors of requests or cancelled replies."""
        if task.error is None and not task.cancelled:
            self._failures = 0
        elif task.error and not isinstance(task.error, PacelineError):
            self._failures += 1

    def _start_over(self, error: Exception | None) -> list[TaskOutput]:
        """End all replies, including replies that a failed turn has ended without delivering their end."""
        try:
            self._scheduler.close()
        except Exception:
            _log.exception("closing the scheduler failed")
        self._scheduler = self._new_scheduler()
        for task in self._unfinished:
            task.error, task.done = task.error or error, True
        return [(task, []) for task in self._unfinished]

    def _new_scheduler(self) -> Scheduler:
        # `fits` must not refer to this worker: the cycle would keep the model in memory until garbage is collected.
        fits = partial(_fits, self.limits.cache_positions, self._positions)
        return Scheduler(self.llm.engine, self.limits.slots, self.limits.prefill_quota, fits)


def _drafted(task: Task) -> int:
    return task.request.stats.drafted if task.request else 0


def _fits(room: int, positions: Callable[[Sequence[int]], int], lengths: Sequence[int]) -> bool:
    return positions(lengths) <= room


def _positions(state: float, rectangle: bool, lengths: Sequence[int]) -> int:
    """Return the positions of a cache that holds texts of these lengths.

    Args:
        state: See `WorkerLimits.state_positions`.
        rectangle: True if every text takes the positions of the longest text, and their number is rounded up to a power
            of two.
        lengths: The lengths of the texts.
    """
    if not lengths:
        return 0
    positions = max(lengths) << (len(lengths) - 1).bit_length() if rectangle else sum(lengths)
    return positions + math.ceil(sum(map(max_states, lengths)) * state)


def trim_memory() -> None:
    """Return the C library's free memory to the system, if the library supports this (glibc). It takes milliseconds."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # not in musl
        trim(0)
