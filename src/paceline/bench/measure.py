"""The interleaved run: every system answers every question, one after the other, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.questions import Question
from paceline.engine.stats import Stats
from paceline.errors import PacelineError


class Lost(PacelineError):
    """A system that cannot answer any more: it is left out, the others go on."""


@dataclass(frozen=True, slots=True)
class MeasuredReply:
    """What a system wrote. `first`: seconds until its first token. `stats`: only of Paceline's own."""

    token_ids: list[int]
    first: float
    stats: Stats | None = None


Write = Callable[[str], MeasuredReply]
"""A system: from a question's text to its answer, templates and tokenising included."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one system. `order`: its turn among the systems of this question. `seconds`: wall time, text to
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
        """For JSON."""
        return {
            "system": self.system,
            "question": self.question.id,
            "category": self.question.category,
            "repeat": self.repeat,
            "order": self.order,
            "seconds": round(self.seconds, 5),
            "first": round(self.reply.first, 5),
            "tokens": len(self.reply.token_ids),
            "stats": self.reply.stats.as_dict() if self.reply.stats else None,
        }


PAUSE = 0.02
"""Seconds between replies: threads of the last one that spin while they wait have gone to sleep by then."""


def measure(
    systems: Mapping[str, Write], questions: Sequence[Question], repeats: int = 1
) -> Iterator[Sample | tuple[str, Lost]]:
    """Every system is warmed up with one reply that does not count; then samples come as they are made.

    A machine's speed drifts, so that what is compared must be measured side by side: ratios within a question count.
    A system that is lost on the way is named with its reason, and asked no more.
    """
    left = dict(systems)
    plan = [(-1, questions[0]), *((r, q) for r in range(repeats) for q in questions)]
    for turn, (repeat, question) in enumerate(plan):
        names = list(left)
        start = max(0, turn - 1) % len(names) if names else 0
        for order, name in enumerate(names[start:] + names[:start]):
            time.sleep(PAUSE)
            began = time.perf_counter()
            try:
                reply = left[name](question.text)
            except Lost as lost:
                del left[name]
                yield name, lost
            else:
                if repeat >= 0:
                    yield Sample(name, question, repeat, order, time.perf_counter() - began, reply)
