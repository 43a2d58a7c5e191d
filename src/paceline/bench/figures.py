"""What the samples of a run say."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.bench.measure import Sample
from paceline.engine.stats import Stats


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


def ratios(
    samples: Sequence[Sample], system: str, base: str, figure: Callable[[Sample], float] = lambda sample: sample.speed
) -> list[float]:
    """Per question, the median over repeats of a system's speed by a base's, measured next to each other."""
    measured = ((s, figure(s)) for s in samples if s.system in (system, base))
    speeds = {(s.system, s.question.id, s.repeat): value for s, value in measured if value > 0}
    found: dict[str | int, list[float]] = {}
    for (name, question, repeat), value in speeds.items():
        if name == system and (base, question, repeat) in speeds:
            found.setdefault(question, []).append(value / speeds[base, question, repeat])
    return [median(values) for values in found.values()]


def summarise(samples: Sequence[Sample], system: str, base: str, others: Sequence[str]) -> dict[str, Any]:
    """A system's part of the result. `base`: the one that writes the same way without drafts, by which `same_text`, the
    categories' `ratio` and `decode_ratio` are meant. `ratios`: of its end-to-end speed to the base's and the others'.
    `spread`: by how much its speed on a question differs between repeats, median, None of a single one."""
    own = [s for s in samples if s.system == system]
    categories = dict.fromkeys(s.question.category for s in own)
    return {
        "system": system,
        "base": base,
        "tokens": sum(len(s.reply.token_ids) for s in own),
        "tokens_per_second": speed(own),
        "decode_tokens_per_second": decode_speed(own),
        "first_token_seconds": median(s.reply.first for s in own),
        "ratios": {other: _interval(ratios(samples, system, other)) for other in dict.fromkeys((base, *others))},
        "decode_ratio": _interval(ratios(samples, system, base, lambda s: decode_speed([s]))),
        "spread": _spread(own),
        "same_text": same_text(samples, system, base),
        "categories": {c: _of_category(samples, system, base, c) for c in categories},
        "inside": inside([s.reply.stats for s in own if s.reply.stats]),
    }


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    low, high = bootstrap(values)
    return {"median": median(values), "low": low, "high": high}


def _of_category(samples: Sequence[Sample], system: str, base: str, category: str) -> dict[str, Any]:
    part = [s for s in samples if s.question.category == category]
    own = [s for s in part if s.system == system]
    return {
        "questions": len({s.question.id for s in own}),
        "tokens_per_second": speed(own),
        "ratio": median(ratios(part, system, base)),
        "tokens_per_round": tokens_per_round([s.reply.stats for s in own if s.reply.stats]),
    }


def tokens_per_round(stats: Sequence[Stats]) -> float | None:
    """All tokens by all rounds, the target's own token included."""
    rounds = sum(s.rounds for s in stats)
    return sum(s.tokens for s in stats) / rounds if rounds else None


def accepted_at(stats: Sequence[Stats]) -> list[float]:
    """The share of rounds whose draft was kept to depth 1, 2, ... at least."""
    rounds = sum(s.rounds for s in stats)
    depth = max((len(s.accepted_at) for s in stats), default=0)
    return [sum(s.accepted_at[d] for s in stats if d < len(s.accepted_at)) / rounds for d in range(depth)]


def inside(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """What Paceline's own statistics add. `milliseconds`: of a round, by phase; prefill is no part of it."""
    rounds = sum(s.rounds for s in stats)
    if not rounds:
        return None
    drafted = sum(s.drafted for s in stats)
    phases = ("draft", "verify", "commit", "other")
    return {
        "tokens_per_round": tokens_per_round(stats),
        "drafted_per_round": drafted / rounds,
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "accepted_at": accepted_at(stats),
        "milliseconds": {phase: 1e3 * sum(s.seconds[phase] for s in stats) / rounds for phase in phases},
    }


def same_text(samples: Sequence[Sample], system: str, base: str) -> float:
    """The share of a system's replies whose token ids are the base's."""
    text = {(s.system, s.question.id, s.repeat): s.reply.token_ids for s in samples}
    keys = [key for key in text if key[0] == system]
    return sum(text[key] == text[(base, *key[1:])] for key in keys) / len(keys)


def speed(samples: Sequence[Sample]) -> float:
    """All tokens by all seconds."""
    seconds = sum(s.seconds for s in samples)
    return sum(len(s.reply.token_ids) for s in samples) / seconds if seconds > 0 else 0.0


def decode_speed(samples: Sequence[Sample]) -> float:
    """After the first token, which prefill brings."""
    seconds = sum(s.seconds - s.reply.first for s in samples)
    return sum(len(s.reply.token_ids) - 1 for s in samples if s.reply.token_ids) / seconds if seconds > 0 else 0.0


def _spread(samples: Sequence[Sample]) -> float | None:
    found: dict[str | int, list[float]] = {}
    for s in samples:
        found.setdefault(s.question.id, []).append(s.speed)
    spreads = [statistics.stdev(v) / statistics.fmean(v) for v in found.values() if len(v) > 1]
    return median(spreads) if spreads else None


def findings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What the run says, in sentences. The best of several was chosen on the same data, which favours it a little."""
    lines = []
    for temperature in dict.fromkeys(s["temperature"] for s in summaries):
        part = [s for s in summaries if s["temperature"] == temperature]
        peers = [s for s in part if s["program"] != "paceline"]
        if peers:
            best, rival = (max(found, key=lambda s: s["tokens_per_second"]) for found in (_ours(part), peers))
            lines.append(
                f"the best of Paceline's, {best['system']}, writes {_times(best['ratios'][rival['system']])} as fast "
                f"as the best of the others, {rival['system']}"
            )
    return lines + [line for s in _ours(summaries) if (line := _sampled(s, summaries))]


def _sampled(warm: dict[str, Any], summaries: Sequence[dict[str, Any]]) -> str | None:
    """How much of what a drafter gives greedily is left where tokens are drawn."""
    greedy = [s for s in _ours(summaries) if _same_but_heat(s, warm) and not s["temperature"]]
    hot, cold = ([s["ratios"][s["base"]] for s in found] for found in ([warm], greedy))
    if not (warm["temperature"] and warm["drafter"] and hot[0] and cold and cold[0]):
        return None
    kept = hot[0]["median"] / cold[0]["median"]
    return f"{warm['system']}: {_times(hot[0])} as fast as {warm['base']}, {kept:.2f} of what it gives greedily"


def _ours(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in summaries if s["program"] == "paceline"]


def _same_but_heat(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("program", "drafter", "precision"))


def _times(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} times [{ratio['low']:.2f}, {ratio['high']:.2f}]"
