"""What the samples of a run say."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.bench.measure import Sample
from paceline.stats import Stats


def median(values: Iterable[float]) -> float:
    """The median; NaN of nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def bootstrap(values: Sequence[float], draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """A percentile-bootstrap interval of the median over independent `values`; the same one every time."""
    if not values:
        return float("nan"), float("nan")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    cut = round(draws * (1 - level) / 2)
    return medians[cut], medians[draws - 1 - cut]


def ratios(samples: Sequence[Sample], system: str, base: str) -> list[float]:
    """Per question, the median over repeats of a system's tok/s by a base's, measured next to each other."""
    speed = {(s.system, s.question.id, s.repeat): s.speed for s in samples}
    found: dict[str | int, list[float]] = {}
    for (name, question, repeat), value in speed.items():
        if name == system:
            found.setdefault(question, []).append(value / speed[base, question, repeat])
    return [median(values) for values in found.values()]


def summarise(samples: Sequence[Sample], system: str, base: str) -> dict[str, Any]:
    """A system's part of the result. `ratio`: of its end-to-end speed to the base's, median of questions with its 95 %
    interval; `spread`: by how much its speed on a question differs between repeats, median, None of a single one."""
    own = [s for s in samples if s.system == system]
    categories = dict.fromkeys(s.question.category for s in own)
    over = ratios(samples, system, base)
    low, high = bootstrap(over)
    return {
        "system": system,
        "tokens": sum(len(s.reply.token_ids) for s in own),
        "tokens_per_second": _speed(own),
        "decode_tokens_per_second": _decode_speed(own),
        "first_token_seconds": median(s.reply.first for s in own),
        "ratio": {"base": base, "median": median(over), "low": low, "high": high},
        "spread": _spread(own),
        "same_text": same_text(samples, system, base),
        "categories": {c: _of_category(samples, system, base, c) for c in categories},
        "inside": inside([s.reply.stats for s in own if s.reply.stats]),
    }


def _of_category(samples: Sequence[Sample], system: str, base: str, category: str) -> dict[str, Any]:
    part = [s for s in samples if s.question.category == category]
    own = [s for s in part if s.system == system]
    stats = [s.reply.stats for s in own if s.reply.stats]
    rounds = sum(s.rounds for s in stats)
    return {
        "tokens_per_second": _speed(own),
        "ratio": median(ratios(part, system, base)),
        "tokens_per_round": sum(s.tokens for s in stats) / rounds if rounds else None,
    }


def inside(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """What Paceline's own statistics add. `accepted_at`: the share of rounds kept to depth 1, 2, ...; `milliseconds`:
    of a round, by phase."""
    rounds = sum(s.rounds for s in stats)
    if not rounds:
        return None
    depth = max(len(s.accepted_at) for s in stats)
    kept = [sum(s.accepted_at[d] for s in stats if d < len(s.accepted_at)) / rounds for d in range(depth)]
    phases = ("draft", "verify", "commit", "other")
    drafted = sum(s.drafted for s in stats)
    return {
        "tokens_per_round": sum(s.tokens for s in stats) / rounds,
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "accepted_at": kept,
        "milliseconds": {phase: 1e3 * sum(s.seconds[phase] for s in stats) / rounds for phase in phases},
    }


def same_text(samples: Sequence[Sample], system: str, base: str) -> float:
    """The share of a system's replies whose token ids are the base's."""
    text = {(s.system, s.question.id, s.repeat): s.reply.token_ids for s in samples}
    keys = [key for key in text if key[0] == system]
    return sum(text[key] == text[(base, *key[1:])] for key in keys) / len(keys) if keys else float("nan")


def _speed(samples: Sequence[Sample]) -> float:
    """All tokens by all seconds."""
    seconds = sum(s.seconds for s in samples)
    return sum(len(s.reply.token_ids) for s in samples) / seconds if samples else float("nan")


def _decode_speed(samples: Sequence[Sample]) -> float:
    """After the first token, which prefill brings."""
    seconds = sum(s.seconds - s.reply.first for s in samples)
    return sum(len(s.reply.token_ids) - 1 for s in samples) / seconds if seconds > 0 else float("nan")


def _spread(samples: Sequence[Sample]) -> float | None:
    found: dict[str | int, list[float]] = {}
    for s in samples:
        found.setdefault(s.question.id, []).append(s.speed)
    spreads = [statistics.stdev(v) / statistics.fmean(v) for v in found.values() if len(v) > 1]
    return median(spreads) if spreads else None
