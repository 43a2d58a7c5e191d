"""Computing figures from the samples of a run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.bench.measure import Sample
from paceline.engine.stats import Stats


def median(values: Iterable[float]) -> float:
    """Return the median, or NaN if there are no values."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def bootstrap(values: Sequence[float], draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Return a percentile-bootstrap interval of the median of independent values. It is the same in every run."""
    if not values:
        return float("nan"), float("nan")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    cut = round(draws * (1 - level) / 2)
    return medians[cut], medians[draws - 1 - cut]


def ratio_interval(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median of ratios with its interval, {"median", "low", "high"}, or None if there are no ratios."""
    if not values:
        return None
    low, high = bootstrap(values)
    return {"median": median(values), "low": low, "high": high}


def ratio_of_sums(
    above: Sequence[float], below: Sequence[float], draws: int = 2000, level: float = 0.95
) -> dict[str, float]:
    """Return sum(above) / sum(below) with a percentile-bootstrap interval over the pairs, {"value", "low", "high"}.

    The result is the same in every run.
    """
    generator, pairs = random.Random(0), list(zip(above, below, strict=True))

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in chosen) / max(sum(b for _, b in chosen), 1e-12)

    found = sorted(ratio(generator.choices(pairs, k=len(pairs))) for _ in range(draws))
    cut = round(draws * (1 - level) / 2)
    return {"value": ratio(pairs), "low": found[cut], "high": found[draws - 1 - cut]}


def ratios(
    samples: Sequence[Sample], system: str, base: str, figure: Callable[[Sample], float] = lambda sample: sample.speed
) -> list[float]:
    """Return a system's speed relative to a base for each question, as the median over repeats.

    Only samples of the same repeat, which were measured close together, are compared.
    """
    measured = ((s, figure(s)) for s in samples if s.system in (system, base))
    speeds = {(s.system, s.question.id, s.repeat): value for s, value in measured if value > 0}
    found: dict[str | int, list[float]] = {}
    for (name, question, repeat), value in speeds.items():
        if name == system and (base, question, repeat) in speeds:
            found.setdefault(question, []).append(value / speeds[base, question, repeat])
    return [median(values) for values in found.values()]


def summarise(samples: Sequence[Sample], system: str, base: str, others: Sequence[str]) -> dict[str, Any]:
    """Summarise the samples of a system.

    In the result, `ratios` is the end-to-end speed relative to the base and to the others. `same_text`, `decode_ratio`
    and the `ratio` of a category are relative to the base. `spread` is the relative deviation of the speed between
    repeats, as the median over questions; it is None with a single repeat.

    Args:
        samples: Samples of all systems.
        system: Name of the system.
        base: Name of the same system without drafts.
        others: Names of other systems to compare with.
    """
    own = [s for s in samples if s.system == system]
    categories = dict.fromkeys(s.question.category for s in own)
    return {
        "system": system,
        "base": base,
        "tokens": sum(len(s.reply.token_ids) for s in own),
        "tokens_per_second": speed(own),
        "decode_tokens_per_second": decode_speed(own),
        "first_token_seconds": median(s.reply.first for s in own),
        "ratios": {other: ratio_interval(ratios(samples, system, other)) for other in dict.fromkeys((base, *others))},
        "decode_ratio": ratio_interval(ratios(samples, system, base, lambda s: decode_speed([s]))),
        "spread": _spread(own),
        "same_text": same_text(samples, system, base),
        "categories": {c: _category(samples, system, base, c) for c in categories},
        "inside": rounds([stats for s in own for stats in s.reply.stats]),
    }


def _category(samples: Sequence[Sample], system: str, base: str, category: str) -> dict[str, Any]:
    part = [s for s in samples if s.question.category == category]
    own = [s for s in part if s.system == system]
    return {
        "questions": sum(len(q.texts) for q in {s.question.id: s.question for s in own}.values()),
        "tokens_per_second": speed(own),
        "ratio": median(ratios(part, system, base)),
        "tokens_per_round": tokens_per_round([stats for s in own for stats in s.reply.stats]),
    }


def tokens_per_round(stats: Sequence[Stats]) -> float | None:
    """Return the mean tokens per round, including the target's own token, or None without rounds."""
    total = sum(s.rounds for s in stats)
    return sum(s.tokens for s in stats) / total if total else None


def rounds(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """Return mean values over all rounds, or None without rounds.

    In the result, `accepted_at` is the share of rounds that accepted at least 1, 2, ... draft tokens. `milliseconds` is
    the time of a round by phase, without prefill.
    """
    total = sum(s.rounds for s in stats)
    if not total:
        return None
    drafted, depth = sum(s.drafted for s in stats), max(len(s.accepted_at) for s in stats)
    phases = ("draft", "verify", "commit", "other")
    return {
        "tokens_per_round": tokens_per_round(stats),
        "drafted_per_round": drafted / total,
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "accepted_at": [sum(s.accepted_at[d] for s in stats if d < len(s.accepted_at)) / total for d in range(depth)],
        "milliseconds": {phase: 1e3 * sum(s.seconds[phase] for s in stats) / total for phase in phases},
    }


def same_text(samples: Sequence[Sample], system: str, base: str) -> float:
    """Return the share of a system's replies with the same token ids as the base's replies."""
    text = {(s.system, s.question.id, s.repeat): s.reply.token_ids for s in samples}
    keys = [key for key in text if key[0] == system]
    return sum(text[key] == text[(base, *key[1:])] for key in keys) / len(keys)


def speed(samples: Sequence[Sample]) -> float:
    """Return the mean tokens per second."""
    seconds = sum(s.seconds for s in samples)
    return sum(len(s.reply.token_ids) for s in samples) / seconds if seconds > 0 else 0.0


def decode_speed(samples: Sequence[Sample]) -> float:
    """Return the mean tokens per second after the first token, which excludes prefill."""
    seconds = sum(s.seconds - s.reply.first for s in samples)
    return sum(len(s.reply.token_ids) - 1 for s in samples if s.reply.token_ids) / seconds if seconds > 0 else 0.0


def _spread(samples: Sequence[Sample]) -> float | None:
    speeds: dict[str | int, list[float]] = {}
    for s in samples:
        speeds.setdefault(s.question.id, []).append(s.speed)
    spreads = [statistics.stdev(v) / statistics.fmean(v) for v in speeds.values() if len(v) > 1]
    return median(spreads) if spreads else None


def findings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the result in sentences.

    The best system is chosen on the same data, which favours it slightly.
    """
    ours = [s for s in summaries if s["program"] == "paceline"]
    lines = []
    for temperature in dict.fromkeys(s["temperature"] for s in summaries):
        programs = [[s for s in summaries if s["temperature"] == temperature and (s in ours) == own] for own in (1, 0)]
        if all(programs):
            best, rival = (max(part, key=lambda s: s["tokens_per_second"]) for part in programs)
            lines.append(
                f"the fastest system of Paceline, {best['system']}, has {_times(best['ratios'][rival['system']])} "
                f"the speed of the fastest other system, {rival['system']}"
            )
    lines += [
        f"{s['system']}: {_times(ratio)} the throughput of {s['single']}"
        for s in ours
        if s["width"] > 1 and (ratio := s["ratios"].get(s["single"]))
    ]
    return lines + [line for s in ours if (line := _sampled(s, ours))]


def _sampled(sampled: dict[str, Any], ours: Sequence[dict[str, Any]]) -> str | None:
    """Describe how much of a drafter's greedy speed-up is left when tokens are sampled."""
    same = ("drafter", "precision", "width")
    greedy = [s for s in ours if not s["temperature"] and all(s[key] == sampled[key] for key in same)]
    hot, cold = ([s["ratios"][s["base"]] for s in part] for part in ([sampled], greedy))
    if not (sampled["temperature"] and sampled["drafter"] and hot[0] and cold and cold[0]):
        return None
    kept = hot[0]["median"] / cold[0]["median"]
    return f"{sampled['system']}: {_times(hot[0])} as fast as {sampled['base']}, {kept:.2f} of the greedy speed-up"


def _times(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} times [{ratio['low']:.2f}, {ratio['high']:.2f}]"
