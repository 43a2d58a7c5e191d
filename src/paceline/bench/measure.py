"""Interleaved measurement: every system answers every question in turn, in a rotating order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:  # peers' processes import this module, and not all of them need torch
    from paceline.bench.questions import Question
    from paceline.engine.stats import Stats


class SystemFailed(PacelineError):
    """A system failed. It is dropped, and the measurement continues with the others."""


@dataclass(frozen=True, slots=True)
class MeasuredReply:
    """Reply to a question.

    Attributes:
        token_ids: Token ids of the replies to all its prompts, in order.
        first: Seconds to the first token.
        stats: Paceline's statistics for each prompt. Empty for other programs.
    """

    token_ids: list[int]
    first: float
    stats: tuple[Stats, ...] = ()


Answer = Callable[["Question"], MeasuredReply]
"""A system under test. It converts a question's text to a reply, including chat template and tokenisation."""


class FirstTokenTimer:
    """Seconds from construction to the first `mark`."""

    def __init__(self) -> None:
        self._began, self.seconds = time.perf_counter(), 0.0

    def mark(self) -> None:
        """Record that a token has arrived."""
        self.seconds = self.seconds or time.perf_counter() - self._began


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one system.

    Attributes:
        system: Name of the system.
        question: The question.
        repeat: Number of the repeat.
        order: Position of the system in the order for this question.
        seconds: Wall time from text to text.
        reply: The reply.
    """

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
"""Seconds between replies. Threads of the last system may spin while they wait, and go to sleep during this time."""


def measure(
    systems: Mapping[str, Answer], questions: Sequence[Question], repeats: int = 1
) -> Iterator[Sample | tuple[str, SystemFailed]]:
    """Measure systems in turn.

    Each system first answers an additional question as a warm-up. The speed of a machine drifts, so systems that are
    compared answer the same question directly after each other, and only ratios within a question are used.

    Args:
        systems: Name -> system.
        questions: Questions to answer.
        repeats: Number of times that each question is asked.

    Yields:
        Samples, and the name and error of each system that fails. It is then dropped.
    """
    left = dict(systems)
    # The warm-up uses another text, because a drafter that remembers replies must not have seen a question before.
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
