"""Figures and goals of a load test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import Grid, median
from serve_systems import AUTO, OFF, OPENVINO, OURS, LoadRequest
from tests.support.load_client import Load, Reply

from paceline.bench.figures import ratio_interval
from paceline.bench.tables import interval

Text = tuple[str, str, int]
"""Parts of a reply that must not depend on load: text, finish reason, number of tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of a system with a number of clients. `server_seconds` is the server's CPU time."""

    system: str
    temperature: float
    clients: int
    number: int
    requests: Sequence[LoadRequest]
    load: Load
    server_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of every reply for JSON, without texts."""
        about = {"system": self.system, "temperature": self.temperature, "clients": self.clients, "turn": self.number}
        load = self.load
        about |= {"tokens_per_second": load.speed, "wall": load.wall, "window": load.dry - load.full}
        about |= {"client_seconds": load.client_seconds, "server_seconds": self.server_seconds}
        return about | {"replies": [_row(a, r) for a, r in zip(self.requests, load.replies, strict=True)]}


def _row(request: LoadRequest, reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = {"question": request.question, "tokens": reply.tokens, "prompt_tokens": reply.prompt_tokens}
    found |= {"cached": reply.cached, "finish": reply.finish, "seconds": round(reply.ended - reply.began, 4)}
    found["first"] = round(reply.first, 4) if reply.texts else None
    found["rounds"] = reply.speculation.get("rounds")
    return found | ({"error": reply.error} if reply.error else {})


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is >= a share `share` of all values, or NaN if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def text_of(reply: Reply) -> Text:
    """Return the parts of a reply that must not depend on load."""
    return reply.text, reply.finish, reply.tokens


def summarise(turns: Sequence[Turn], expected: Mapping[tuple[str | int, float], Text]) -> dict[str, Any]:
    """Summarise one system at one temperature and number of clients.

    In the result, `differ` is the number of replies that differ from `expected`, the replies to a single client without
    speculation. It is None for other programs, because their rounding is different.
    """
    first = turns[0]
    pairs = [(a, r) for t in turns for a, r in zip(t.requests, t.load.replies, strict=True)]
    good = [r for _, r in pairs if not r.error]
    differ = sum(not r.error and text_of(r) != expected[a.question, a.temperature] for a, r in pairs)
    rounds = sum(r.speculation.get("rounds", 0) for r in good)
    speeds = [t.load.speed for t in turns]
    return {
        "system": first.system,
        "temperature": first.temperature,
        "clients": first.clients,
        "requests": len(pairs),
        "failed": len(pairs) - len(good),
        "differ": differ if first.system in OURS else None,
        "speeds": speeds,
        "tokens_per_second": median(speeds),
        "first": _spread([r.first for r in good if r.texts]),
        "per_token": _spread([r.per_token for r in good if r.tokens > 1 and r.texts]),
        "gap": _spread([gap for r in good for gap in r.gaps]),
        "tokens_per_round": sum(r.tokens for r in good) / rounds if rounds else None,
        "cached": sum(r.cached for r in good) / max(1, sum(r.prompt_tokens for r in good)),
        "server_cores": sum(t.server_seconds for t in turns) / sum(t.load.wall for t in turns),
        "client_cores": sum(t.load.client_seconds for t in turns) / sum(t.load.wall for t in turns),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "p99": percentile(values, 0.99)}


class Table:
    """Summaries by system, temperature and clients."""

    def __init__(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        self.rows = summaries
        self._at = {(s["system"], s["temperature"], s["clients"]): s for s in summaries}

    def get(self, system: str, temperature: float, clients: int) -> Mapping[str, Any] | None:
        return self._at.get((system, temperature, clients))

    def ratio(self, above: tuple[str, float, int], below: tuple[str, float, int]) -> dict[str, float] | None:
        """Return the ratio of two systems' speeds, or None if one of them was not measured."""
        a, b = self._at.get(above), self._at.get(below)
        return ratio_interval([x / y for x, y in zip(a["speeds"], b["speeds"], strict=True)]) if a and b else None

    def grid(self, temperature: float) -> Grid:
        rows = [self._row(s) for s in self.rows if s["temperature"] == temperature]
        columns = [
            "clients, system",
            "tok/s",
            "x off [95 %]",
            "first text, ms",
            "p99",
            "per token, ms",
            "p99",
            "gap p99",
        ]
        columns += ["tokens/round", "failed", "differ", "server cores", "client cores"]
        return Grid(f"Load{f', T={temperature:g}' if temperature else ', greedy'}", columns, rows)

    def _row(self, s: Mapping[str, Any]) -> list[str]:
        key = (s["temperature"], s["clients"])
        times = None if s["system"] == OFF else self.ratio((s["system"], *key), (OFF, *key))
        found = [f"{s['clients']}, {s['system']}", f"{s['tokens_per_second']:.0f}", interval(times)]
        found += [f"{1e3 * s[what][which]:.0f}" for what in ("first", "per_token") for which in ("median", "p99")]
        found += [f"{1e3 * s['gap']['p99']:.0f}"]
        found += ["" if s["tokens_per_round"] is None else f"{s['tokens_per_round']:.2f}"]
        found += [f"{s['failed']} of {s['requests']}", "" if s["differ"] is None else str(s["differ"])]
        return [*found, f"{s['server_cores']:.2f}", f"{s['client_cores']:.2f}"]


def goals(table: Table, temperatures: Sequence[float], clients: Sequence[int]) -> list[tuple[str, str, bool]]:
    """Return (goal, figure, True if it holds) for each goal with measurements."""
    ours = [s for s in table.rows if s["system"] in OURS]
    failed, differ = (sum(s[key] for s in ours) for key in ("failed", "differ"))
    requests = sum(s["requests"] for s in ours)
    found = [
        ("no request fails", f"{failed} of {requests} failed", not failed),
        ("every reply equals the reply to a single client with speculation off", f"{differ} differ", not differ),
    ]
    for temperature in temperatures:
        found += _goals_at(table, temperature, max(clients))
    return found


def _goals_at(table: Table, temperature: float, most: int) -> list[tuple[str, str, bool]]:
    heat = f", T={temperature:g}" if temperature else ""
    found = []
    if times := table.ratio((AUTO, temperature, 16), (OFF, temperature, 1)):
        goal = f"16 clients: 3 times the throughput of one without speculation{heat}"
        found.append((goal, interval(times), times["median"] >= 3))
    if times := table.ratio((AUTO, temperature, 16), (OFF, temperature, 16)):
        # The median of a few turns is noisy, so this goal fails only if the whole interval is below 1.
        found.append((f"16 clients: not slower than speculation off{heat}", interval(times), times["high"] >= 1))
    if (at := table.get(AUTO, temperature, 16)) and not math.isnan(at["first"]["median"]):
        times_median = at["first"]["p99"] / at["first"]["median"]
        goal = f"16 clients: p99 of time to first text under 4 times its median{heat}"
        found.append((goal, f"{times_median:.2f} times", times_median < 4))
    ours = [s for name in OURS if (s := table.get(name, temperature, most))]
    best = max(ours, key=lambda s: float(s["tokens_per_second"]), default=None)
    if best and (times := table.ratio((best["system"], temperature, most), (OPENVINO, temperature, most))):
        found.append((f"{most} clients: faster than OpenVINO GenAI{heat}", interval(times), times["median"] > 1))
    return found


def goal_grid(found: Sequence[tuple[str, str, bool]]) -> Grid:
    """Return the goals as a table."""
    rows = [[goal, figure, "yes" if held else "NO"] for goal, figure, held in found]
    return Grid("Goals", ["goal", "measured", "met"], rows)
