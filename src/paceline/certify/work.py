"""Quality and speed: correct answers and tokens per second, with and without speculation."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.certify.compare import ALPHA, Sides
from paceline.certify.prompts import NamedPrompt
from paceline.certify.side import Side
from paceline.certify.statistics import mcnemar, median_interval


@dataclass(frozen=True, slots=True)
class QualityResult:
    """Correct answers of both sides to the same questions.

    Attributes:
        questions: Number of questions.
        right: Correct answers with speculation.
        plain_right: Correct answers without speculation.
        worse: Questions that only the plain side answered correctly.
        better: Questions that only the speculative side answered correctly.
        p_value: McNemar's exact test, two-sided.
    """

    questions: int
    right: int
    plain_right: int
    worse: int
    better: int
    p_value: float

    @property
    def differs(self) -> bool:
        """True if speculation leads to fewer correct answers."""
        return self.p_value < ALPHA and self.worse > self.better


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """Tokens per second of both sides, and their ratio with its 95% interval.

    Attributes:
        prompts: Number of prompts.
        rate: Median tokens per second with speculation.
        plain_rate: The same without speculation.
        ratio: Median ratio of the two for the same prompt.
        low: Lower end of the ratio's interval.
        high: Upper end.
    """

    prompts: int
    rate: float
    plain_rate: float
    ratio: float
    low: float
    high: float


def compare_quality(sides: Sides, questions: Sequence[tuple[NamedPrompt, str]]) -> QualityResult:
    """Ask both sides all questions, and compare their answers in pairs."""

    def one(question: tuple[NamedPrompt, str]) -> tuple[bool, bool]:
        task, answer = question
        sides.note(f"quality: {task.name}")
        a, b = (is_right(side.ask(task.text, max_tokens=96).text, answer) for side in (sides.speculative, sides.plain))
        return a, b

    count = Counter(sides.run_concurrently(one, questions))
    worse, better, both = count[False, True], count[True, False], count[True, True]
    total = sum(count.values())
    return QualityResult(total, both + better, both + worse, worse, better, mcnemar(worse, better))


def is_right(text: str, answer: str) -> bool:
    """Return True if the last "Answer:" of a reply, or its last number or word, is the answer."""
    tail = re.split(r"(?i)answer\s*:", text)[-1]
    words = re.findall(r"\w+", tail.replace(",", ""))
    return bool(words) and answer.casefold() in (words[0].casefold(), words[-1].casefold())


def compare_speed(sides: Sides, tasks: Sequence[NamedPrompt], tokens: int) -> SpeedResult | None:
    """Time both sides on the same prompts, one request at a time, in turns (A B B A)."""
    rates: list[tuple[float, float]] = []
    for side in (sides.speculative, sides.plain):
        side.ask(tasks[0].text, max_tokens=8)
    for i, task in enumerate(sides.in_time(tasks)):
        sides.note(f"speed: {task.name}")
        order = (sides.speculative, sides.plain, sides.plain, sides.speculative)
        if i % 2:
            order = (sides.plain, sides.speculative, sides.speculative, sides.plain)
        timed = [(side, _rate(side, task, tokens)) for side in order]
        own = [rate for side, rate in timed if side is sides.speculative]
        plain = [rate for side, rate in timed if side is sides.plain]
        if all(own) and all(plain):
            rates.append((math.sqrt(own[0] * own[1]), math.sqrt(plain[0] * plain[1])))
    if not rates:
        return None
    ratio, low, high = median_interval([a / b for a, b in rates])
    return SpeedResult(len(rates), median(a for a, _ in rates), median(b for _, b in rates), ratio, low, high)


def _rate(side: Side, task: NamedPrompt, tokens: int) -> float:
    reply = side.ask(task.text, max_tokens=tokens)
    return (reply.tokens or 0) / max(reply.seconds, 1e-9)
