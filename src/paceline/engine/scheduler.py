"""Who runs next: seats, admission, prompts fed between rounds. Knows no threads, no clients and no words."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from math import inf

from paceline.engine.detokenizer import Chunk
from paceline.engine.engine import Engine, Request
from paceline.errors import OutOfMemory, TimedOut
from paceline.verify.tree import PREFILL_ROWS

Begin = Callable[[Request | None], Request]
"""Takes a slot for a reply; given a request with the same prompt that has been prefilled, if there is one."""
Fits = Callable[[int, int], bool]
"""Whether there is memory for so many texts, the longest of so many tokens."""

_AHEAD = 256
"""Tokens beyond what it has that a text must find room for before it begins."""
_HURRY = 4
"""A queue that grows would keep everybody waiting for a first token, however short the pauses of the others are."""


@dataclass(eq=False, slots=True)
class Task:
    """One reply: waiting, then entering (its prompt is being fed), running, done.

    `group`: replies to one prompt share its prefill where they run together. `client`: for whom it is. `prompt`: its
    tokens. `deadline`: when it must be done, by the scheduler's clock. `cancelled`: set it at any moment, from any
    thread, and the reply ends before its next round. `came`, `began`: when it was made, and when it got a seat.
    `request`: None before it has begun. `error`: why it ended early.
    """

    begin: Begin
    prompt: int = 0
    group: Hashable | None = None
    client: Hashable | None = None
    deadline: float = inf
    cancelled: bool = False
    came: float = field(default_factory=time.monotonic)
    began: float | None = None
    request: Request | None = None
    error: Exception | None = None
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens of its text so far."""
        return len(self.request.token_ids) if self.request else self.prompt


Event = tuple[Task, list[Chunk]]
"""What a task has to show; the last one, with or without chunks, comes when it is `done`."""


class Scheduler:
    """Replies in ragged rounds, up to `width` at once; of those that wait the next is one of the client who has the
    fewest seats, the oldest first.

    Between two rounds `quota` tokens of prompts are fed, so that a long prompt does not stall those who are reading
    their replies; where several wait that could begin, so many times that, up to `_HURRY` times. Where memory gets
    short, the reply that came last gives its slot back and goes on later: its text does not depend on that. One that
    fails ends alone.
    """

    def __init__(
        self,
        engine: Engine,
        width: int,
        quota: float = inf,
        fits: Fits = lambda count, longest: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._width, self._quota, self._fits, self._clock = engine, width, quota, fits, clock
        self.waiting: deque[Task] = deque()
        self.entering: Task | None = None
        # In the order of their slots: the cache fills the place of one that leaves with the last, and so does this.
        self.running: list[Task] = []
        self._most = width
        """Seats at this moment: fewer than there are after memory ran out, until somebody leaves."""
        self._prefilled: dict[Hashable | None, Request] = {}
        """Per group the latest request, which others can begin like as long as it has a slot."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.entering or self.running)

    @property
    def active(self) -> list[Task]:
        """Those that hold a slot. Other threads may ask."""
        entering = self.entering  # read once: the next moment it may be another, or none
        return [*self.running, *([entering] if entering else [])]

    def add(self, task: Task) -> None:
        self.waiting.append(task)

    def turn(self) -> list[Event]:
        """Ends what must end, feeds prompts, runs one round."""
        ended = [*self._expire(), *self._enter()]
        self._yield_room()
        return [*((task, []) for task in ended), *self._round()]

    def close(self) -> list[Event]:
        """End all replies here."""
        everyone = [*self.waiting, *self.active]
        for task in everyone:
            self._end(task)
        self.waiting.clear()
        return [(task, []) for task in everyone]

    # Ending

    def _expire(self) -> list[Task]:
        """Those that nobody waits for any more, or for too long."""
        now, ended = self._clock(), []
        for task in [*self.active, *self.waiting]:
            if not task.cancelled and now >= task.deadline:
                task.error = TimedOut("the reply took longer than it was given", "Give more time, or ask for less")
            if task.cancelled or task.error:
                ended.append(task)
                self._end(task)
        if ended:
            self.waiting = deque(task for task in self.waiting if not task.done)
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

    def _leave_batch(self, task: Task) -> None:
        self._most = self._width
        if task is self.entering:
            self.entering = None
        elif task in self.running:
            last = self.running.pop()
            if last is not task:
                self.running[self.running.index(task)] = last

    # Beginning

    def _enter(self) -> list[Task]:
        """Feed prompts, as many tokens as may be fed now. Returns those that could not begin."""
        could = min(len(self.waiting), self._most - len(self.running))
        left, failed = self._quota * max(1, min(could, _HURRY)), []
        while left > 0 and (task := self.entering or self._next()):
            left -= self._feed(task, left)
            if task.done:
                failed.append(task)
        return failed

    def _feed(self, task: Task, most: float) -> float:
        """As `_chunk`. A prompt for which there is no memory waits again, and uses up what may be fed."""
        try:
            return self._chunk(task, most)
        except OutOfMemory as error:
            if self._put_back(task):
                return most
            self._fail(task, error)
        except Exception as error:
            self._fail(task, error)
        return 0

    def _next(self) -> Task | None:
        """The next that waits, if there is room for it."""
        count = len(self.running) + 1
        if not self.waiting or count > self._most:
            return None
        seats = Counter(one.client for one in self.running)
        # Whoever had to give a slot back has waited before all others.
        task = min(self.waiting, key=lambda one: (one.request is None, seats[one.client]))
        longest = _AHEAD + max(one.length for one in (task, *self.running))
        if self.running and not self._fits(count, longest):
            return None
        self.entering = task
        self.waiting.remove(task)
        return task

    def _chunk(self, task: Task, most: float) -> int:
        """A chunk of the prompt; after its last the task is running. Returns its tokens."""
        task.began = task.began or self._clock()
        if task.request is None:
            like = self._prefilled.get(task.group) if task.group is not None else None
            task.request = task.begin(like if like and like.active else None)
        elif not task.request.active:
            self._engine.resume(task.request)
        fed = self._engine.feed(task.request, int(min(most, PREFILL_ROWS)))
        if self._engine.cache.lengths[task.request.slot] == task.request.position:
            self.entering = None
            self.running.append(task)
            if task.group is not None:
                self._prefilled[task.group] = task.request
        return fed

    def _fail(self, task: Task, error: Exception) -> Task:
        task.error = error
        self._end(task)
        return task

    # Memory

    def _yield_room(self) -> None:
        """Where texts have outgrown the memory there is, those that came last make room."""
        while len(self.active) > 1:
            if self._fits(len(self.active), max(task.length for task in self.active)):
                return
            self._put_back(_latest(self.active))

    def _put_back(self, task: Task) -> bool:
        """It waits again, before all others; False where it is alone and waiting would not help."""
        if len(self.active) < 2:
            return False
        self._leave_batch(task)
        if task.request:
            self._engine.suspend(task.request)
        self.waiting.appendleft(task)
        self._most = len(self.active)
        return True

    # Rounds

    def _round(self) -> list[Event]:
        if not self.running:
            return []
        together = list(self.running)
        try:
            shown = self._engine.step([_request(task) for task in together])
        except OutOfMemory as error:
            # A round that was judged cannot be tried again: its tokens would be in the texts and never shown.
            if not any(_request(task).spoilt for task in together) and self._put_back(_latest(together)):
                return []
            return list(self._one_by_one(together, error))
        except Exception as error:
            return list(self._one_by_one(together, error))
        return self._shown(together, shown)

    def _one_by_one(self, together: list[Task], error: Exception) -> Iterator[Event]:
        """A round that failed for all is tried again for each, so that only those fail that must."""
        for task in together:
            request = _request(task)
            if len(together) == 1 or request.spoilt:
                yield self._fail(task, error), []
                continue
            try:
                shown = self._engine.step([request])
            except Exception as own:
                yield self._fail(task, own), []
            else:
                yield from self._shown([task], shown)

    def _shown(self, together: list[Task], shown: list[list[Chunk]]) -> list[Event]:
        for task in together:
            if _request(task).finish:
                self._end(task)
        return list(zip(together, shown, strict=True))


def _latest(tasks: list[Task]) -> Task:
    """The one that came last."""
    return max(tasks, key=lambda task: task.came)


def _request(task: Task) -> Request:
    assert task.request is not None
    return task.request
