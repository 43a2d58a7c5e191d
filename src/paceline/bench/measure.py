"""The interleaved run: every system answers every question, one after the other, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.questions import Question
from paceline.stats import Stats


@dataclass(frozen=True, slots=True)
class Reply:
    """What a system wrote. `first`: seconds until its first token. `stats`: only of Paceline's own."""

    token_ids: list[int]
    first: float
    stats: Stats | None = None


Write = Callable[[str], Reply]
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
    reply: Reply

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


def measure(systems: Mapping[str, Write], questions: Sequence[Question], repeats: int = 1) -> Iterator[Sample]:
    """Every system is warmed up with one reply that does not count; then samples come as they are made.

    A machine's speed drifts, so that what is compared must be measured side by side: ratios within a question count.
    """
    for write in systems.values():
        write(questions[0].text)
    names = list(systems)
    for turn, (repeat, question) in enumerate((r, q) for r in range(repeats) for q in questions):
        start = turn % len(names)
        for order, name in enumerate(names[start:] + names[:start]):
            began = time.perf_counter()
            reply = systems[name](question.text)
            yield Sample(name, question, repeat, order, time.perf_counter() - began, reply)
