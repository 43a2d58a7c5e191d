"""Continuous batching: admission, prefill between rounds, preemption. The scheduler drives every reply.

Between two rounds, some prompt tokens are fed (`reading_pace.py` decides how many). Several prompts may be partly read
at the same time. Three out of four pieces come from the prompt with the fewest unread tokens, so that a short prompt
does not wait for a long one. Every fourth piece comes from the prompt that has waited longest for its next piece, so
that every prompt makes progress.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf

from paceline.engine.detokenizer import Chunk
from paceline.engine.engine import Engine
from paceline.engine.reading_pace import ReadingPace
from paceline.engine.request import Request
from paceline.errors import OutOfMemory, TimedOut
from paceline.verify.tree import PREFILL_ROWS
from paceline.vision.prompt import cache_ids

_log = logging.getLogger("paceline.engine")

BeginRequest = Callable[[Request | None], Request]
"""A function that starts a request. Its argument is a prefilled request with the same prompt, or None."""
FitsInMemory = Callable[[Sequence[int]], bool]
"""A function that returns True if there is memory for texts of these lengths, in tokens."""

_HEADROOM_TOKENS = 256
"""Number of additional tokens for which there must be memory before a text is admitted."""
_MAX_CATCH_UP = 4
"""While requests are waiting, up to this multiple of the usual number of prompt tokens is fed between two rounds. A
higher multiple would shorten the wait for first tokens, but would stall running replies."""
_FAIR_INTERVAL = 4
"""Every `_FAIR_INTERVAL`-th piece comes from the prompt that has waited longest."""


@dataclass(eq=False, slots=True)
class Task:
    """A reply, which is at first waiting, then reading its prompt, then running, and finally done.

    Attributes:
        begin: Starts the request. None if `request` has already been started.
        prompt: Token ids of the prompt, which are needed until the request exists.
        group: The tasks of a group have the same prompt, and share its prefill if they run at the same time. None for
            no group.
        client: The client that requested the reply.
        deadline: Latest time for the reply to end, on the scheduler's clock.
        cancelled: True to end the reply before its next round. Any thread may set it at any time.
        arrived: Time at which the task was created.
        started: Time at which the task got its first slot.
        request: The request. None until it exists.
        error: The error that ended the reply, or None.
        done: True if the reply has ended.
        unread: Number of prompt tokens that must still be fed. This is an estimate until the reply has a slot.
    """

    begin: BeginRequest | None = None
    prompt: Sequence[int] = ()
    group: Hashable | None = None
    client: Hashable | None = None
    deadline: float = inf
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    request: Request | None = None
    error: Exception | None = None
    done: bool = False
    unread: int = 0

    @property
    def length(self) -> int:
        """Number of tokens in the prompt and in the reply so far."""
        return len(self.request.token_ids if self.request else self.prompt)


TaskOutput = tuple[Task, list[Chunk]]
"""A task and its new chunks. Each task gets a final output when it is `done`, even if there are no new chunks."""


class Scheduler:
    """Runs replies in rounds, up to `width` replies at a time. The next task to start is the oldest task of the client
    that has the fewest active replies.

    Between two rounds, at most `quota` prompt tokens are fed, so that a long prompt does not stall running replies. If
    several tasks could start, this number is multiplied by the number of these tasks, up to `_MAX_CATCH_UP`, until the
    first of their prompts is complete. That reply's first token then does not wait for the other prompts. A waiting
    task may overtake the prompts that are being read if it has less than half the unread tokens of each of them. All
    other waiting tasks wait for these prompts, so only few prompts are partly read at any time. If memory runs out, the
    reply that arrived last releases its slot, and continues later with the same text. If a reply fails, the other
    replies are not affected.
    """

    def __init__(
        self,
        engine: Engine,
        width: int,
        quota: float = inf,
        fits: FitsInMemory = lambda lengths: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._width, self._fits, self._clock = engine, width, fits, clock
        self._pace = ReadingPace(quota)
        self.waiting: deque[Task] = deque()
        self.reading: list[Task] = []
        """The tasks whose prompts are partly read. The first of them has waited longest for its next piece."""
        self._num_pieces = 0
        # Tasks are in the order of their slots. When a reply leaves, a shared cache moves the last slot to the free
        # place, so the last task moves there as well.
        self.running: list[Task] = []
        self._limit = width
        """Maximum number of slots in use. After memory has run out, it is lower than `width` until a reply ends."""
        self._open: dict[Task, None] = {}
        """All tasks that have not ended, oldest first. An interrupt may leave a task in none of the lists above."""
        self._prefilled: dict[Hashable | None, Request] = {}
        """Group -> its latest prefilled request. Other requests can copy its state as long as it holds a slot."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.reading or self.running)

    @property
    def active(self) -> list[Task]:
        """The tasks that hold a slot. Any thread may read this."""
        return [*self.running, *self.reading]

    def add(self, task: Task) -> None:
        """Queue a task."""
        self._open[task] = None
        if task.prompt:
            prefixes = self._engine.prefixes
            task.unread = len(task.prompt) - (0 if prefixes is None else prefixes.estimate_hit(cache_ids(task.prompt)))
        self.waiting.append(task)

    def turn(self) -> list[TaskOutput]:
        """End tasks that are cancelled or past their deadline, feed prompts, and run one round. Return new chunks and
        ended tasks.

        If the round fails, it is repeated for each task separately, so that only the failing tasks end.
        """
        outputs: list[TaskOutput] = [(task, []) for task in (*self._expire(), *self._prefill())]
        self._make_room()
        began, batches = self._clock(), deque([[*self.running]] if self.running else [])
        while batches:
            batch = batches.popleft()
            try:
                chunks = self._engine.step([_request(task) for task in batch])
            except Exception as error:
                if isinstance(error, OutOfMemory) and self._preempt(_latest(batch)):
                    _log.debug("a reply is waiting for memory", exc_info=True)
                elif len(batch) == 1:
                    self._fail(batch[0], error)
                    outputs.append((batch[0], []))
                else:
                    _log.debug("a round of %d replies failed and is repeated for each reply", len(batch), exc_info=True)
                    batches += [[task] for task in batch]
                continue
            for task in batch:
                if _request(task).finish:
                    self._end(task)
            outputs += zip(batch, chunks, strict=True)
        self._pace.round_seconds = self._clock() - began
        return outputs

    def close(self) -> list[TaskOutput]:
        """End all tasks."""
        tasks = list(self._open)
        with ExitStack() as every:  # end all tasks, even if one of them raises an error
            for task in reversed(tasks):
                every.callback(self._end, task)
        self.waiting.clear()
        return [(task, []) for task in tasks]

    # Ending

    def _expire(self) -> list[Task]:
        """End the tasks that are cancelled or past their deadline."""
        now, ended = self._clock(), []
        for task in [*self.active, *self.waiting]:
            if not task.cancelled and now >= task.deadline:
                task.error = TimedOut("the reply took longer than its time limit", "Raise the limit, or ask for less")
            if task.cancelled or task.error:
                ended.append(task)
                self._end(task)
        return ended

    def _end(self, task: Task) -> None:
        self._leave_batch(task)
        if task.request:
            self._engine.finish(task.request)
            task.request.stats.close()
            task.error = task.error or task.request.error
            if self._prefilled.get(task.group) is task.request:
                del self._prefilled[task.group]
        task.done = True
        self._open.pop(task, None)

    def _leave_batch(self, task: Task) -> None:
        self._limit = self._width
        if task in self.reading:
            self.reading.remove(task)
        elif task in self.running:
            last = self.running.pop()
            if last is not task:
                self.running[self.running.index(task)] = last
        elif task in self.waiting:
            self.waiting.remove(task)

    # Beginning

    def _prefill(self) -> list[Task]:
        """Feed prompts up to the limit of this turn. Return the tasks that ended without a token.

        If there is no memory for a prompt, its task goes back to the queue, and no more prompts are fed in this turn.
        """
        startable = min(len(self._may_start()), self._limit - len(self.active))
        limit, fed, ended = self._pace.limit(bool(self.running)), 0.0, list[Task]()
        if self.running:
            limit *= max(1, min(startable, _MAX_CATCH_UP))
        while fed < limit and (task := self._take_next()):
            try:
                request, began = self._with_slot(task), self._clock()
                count = self._engine.feed(request, int(min(limit - fed, PREFILL_ROWS)))
                self._pace.observe(count, self._clock() - began)
                self._note_progress(task, request)
                fed += count
            except Exception as error:
                if isinstance(error, OutOfMemory) and self._preempt(task):
                    _log.debug("a prompt is waiting for memory", exc_info=True)
                    fed = limit
                else:
                    self._fail(task, error)
            if task.done:
                ended.append(task)
            if task not in self.reading and not self._is_shared(task):
                # The prompt is complete, so its reply is now waiting for a round, and the limit for running replies
                # applies. Tasks with the same prompt are started first, so that all of them take part in that round.
                limit = self._pace.limit(running=True)
        return ended

    def _is_shared(self, task: Task) -> bool:
        """Return True if waiting tasks have the same prompt, so that they need not feed it again."""
        return task.group is not None and any(one.group == task.group for one in self.waiting)

    def _note_progress(self, task: Task, request: Request) -> None:
        """Record the number of tokens that are left to feed after a piece of a prompt. If it is 0, the task is now
        running."""
        task.unread = request.position - self._engine.cache.lengths[request.slot]
        if task.done or task.unread:
            return
        self.reading.remove(task)
        self.running.append(task)
        if not request.stream.left:  # the caller requested an empty reply
            request.finish = "length"
            self._end(task)
        elif task.group is not None:
            self._prefilled[task.group] = request
            for one in self.waiting:
                if one.group == task.group and one.request is None:
                    one.unread = 0

    def _with_slot(self, task: Task) -> Request:
        """Return a task's request. If it does not exist yet, it is created. If it has no slot, it is resumed."""
        task.started = task.started or self._clock()
        if task.request is None and task.begin:
            source = self._prefilled.get(task.group) if task.group is not None else None
            task.request = task.begin(source if source and source.active else None)
        request = _request(task)
        if not request.active:
            self._engine.resume(request)
        return request

    def _take_next(self) -> Task | None:
        """Return the task whose prompt is fed next, or None. The task moves to the end of `reading`.

        Before that, a waiting task leaves the queue if it may start.
        """
        if (task := self._startable()) is not None:
            self.waiting.remove(task)
            self.reading.append(task)
        if not self.reading:
            return None
        self._num_pieces += 1
        in_turn = self._num_pieces % _FAIR_INTERVAL == 0
        task = self.reading[0] if in_turn else min(self.reading, key=lambda one: one.unread)
        self.reading.remove(task)
        self.reading.append(task)
        return task

    def _startable(self) -> Task | None:
        """Return the waiting task that may start now, or None if there is no such task, no free slot or no memory."""
        may = self._may_start()
        if not may or len(self.active) >= self._limit:
            return None
        active = Counter(one.client for one in self.active)
        # Preempted tasks come first.
        task = min(may, key=lambda one: (one.request is None, active[one.client]))
        if self.active and not self._fits([_HEADROOM_TOKENS + one.length for one in (task, *self.active)]):
            return None
        return task

    def _may_start(self) -> list[Task]:
        """Return the waiting tasks that need not wait for the prompts that are being read. If none is being read, these
        are all waiting tasks."""
        least = min((one.unread for one in self.reading), default=inf)
        oldest = min((one.arrived for one in self.reading), default=inf)
        return [one for one in self.waiting if one.arrived <= oldest or (one.prompt and 2 * one.unread < least)]

    def _fail(self, task: Task, error: Exception) -> None:
        task.error = error
        if task.request:
            task.request.fail(error)
        self._end(task)

    # Memory

    def _make_room(self) -> None:
        """Preempt tasks, latest first, until the texts fit into memory."""
        while len(self.active) > 1:
            if self._fits([task.length for task in self.active]):
                return
            self._preempt(_latest(self.active))

    def _preempt(self, task: Task) -> bool:
        """Move an active task to the front of the queue. If it is the only active task, waiting would not help. In this
        case, do nothing and return False."""
        if len(self.active) < 2:
            return False
        self._leave_batch(task)
        if task.request:
            self._engine.suspend(task.request)
        self.waiting.appendleft(task)
        self._limit = len(self.active)
        return True


def _latest(tasks: list[Task]) -> Task:
    """Return the task that arrived last."""
    return max(tasks, key=lambda task: task.arrived)


def _request(task: Task) -> Request:
    assert task.request is not None
    return task.request
