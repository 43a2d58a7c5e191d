"""Interleaved measurement: every system answers every question in turn, in a rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.questions import Question
from paceline.engine.stats import Stats
from paceline.errors import PacelineError


class SystemFailed(PacelineError):
    """A system that cannot answer any more: it is dropped and the others go on."""


@dataclass(frozen=True, slots=True)
class MeasuredReply:
    """Reply to a question: token ids (of all its prompts, in order), seconds to the first token, and Paceline's
    statistics per prompt (none for other programs)."""

    token_ids: list[int]
    first: float
    stats: tuple[Stats, ...] = ()


Answer = Callable[[Question], MeasuredReply]
"""A system under test: from a question's text to its reply, chat template and tokenising included."""


class FirstTokenTimer:
    """Seconds from construction to the first `mark`."""

    def __init__(self) -> None:
        self._began, self.seconds = time.perf_counter(), 0.0

    def mark(self) -> None:
        """Note that a token has arrived."""
        self.seconds = self.seconds or time.perf_counter() - self._began


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one system. `order`: its turn among the systems for this question. `seconds`: wall time from text to
    text."""

    system: str
    question: Question
    repeat: int
    order: int
    seconds: float
    reply: MeasuredReply

    @property
    def speed(self) -> float:
        """Tokens per second, end to end."""
        return len(self.reply.token_ids) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the sample without its text, for JSON."""
        return {
            "system": self.system,
            "question": self.question.id,
            "category": self.question.category,
            "repeat": self.repeat,
            "order": self.order,
            "seconds": round(self.seconds, 5),
            "first": round(self.reply.first, 5),
            "tokens": len(self.reply.token_ids),
            "stats": [stats.as_dict() for stats in self.reply.stats],
        }


WARM_UP = "Count from one to ten, then from ten to one."
PAUSE = 0.02
"""Seconds between replies, in which threads of the last system that spin while they wait go to sleep."""


def measure(
    systems: Mapping[str, Answer], questions: Sequence[Question], repeats: int = 1
) -> Iterator[Sample | tuple[str, SystemFailed]]:
    """Warm every system up with one unrecorded reply to another question, then yield samples as they are made.

    A machine's speed drifts, so what is compared is measured side by side and only ratios within a question count.
    A system that fails is yielded once with its error and then dropped.
    """
    left = dict(systems)
    # A drafter that remembers earlier replies must not have seen a question before.
    warm_up = replace(questions[0], id="warm-up", text=WARM_UP, more=(WARM_UP,) * len(questions[0].more))
    plan = [(-1, warm_up), *((repeat, question) for repeat in range(repeats) for question in questions)]
    for turn, (repeat, question) in enumerate(plan):
        names = list(left)
        start = max(0, turn - 1) % len(names) if names else 0
        for order, name in enumerate(names[start:] + names[:start]):
            time.sleep(PAUSE)
            began = time.perf_counter()
            try:
                reply = left[name](question)
            except SystemFailed as error:
                del left[name]
                yield name, error
            else:
                if repeat >= 0:
                    yield Sample(name, question, repeat, order, time.perf_counter() - began, reply)
