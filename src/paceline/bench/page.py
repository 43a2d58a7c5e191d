"""The result of a run as a self-contained HTML page: speed by category, acceptance by depth, time of a round by
phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.bench.plots import Series, dot_plot, line_plot, stacked_bars
from paceline.bench.tables import Summary, all_grids, by_temperature, main_grids, remarks, temperature_suffix, where

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;line-height:1.25;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .3rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap;font-weight:400}
thead th{font-weight:600}
th:first-child{position:sticky;left:0;background:Canvas;text-align:left;padding-left:0}
.plot{width:100%;min-width:40rem;height:auto;display:block}
.plot text{font-family:system-ui,sans-serif!important}
code,small{opacity:.8;overflow-wrap:anywhere}
summary{cursor:pointer;margin-top:2rem}
"""

_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>paceline bench</title><style>{_STYLE}</style>"
)


def page(result: Mapping[str, Any]) -> str:
    """Return the result of `run` as HTML. This needs matplotlib (see `plots.require_matplotlib`)."""
    source, main = result["provenance"], main_grids(result)
    here = escape(f"{source['date']}; {where(source)}")
    lines = remarks(result)
    parts = [
        f"<h1>paceline bench: {escape(Path(source['settings']['model']).name)}</h1>",
        f"<p><code>{escape(source['command'])}</code><br><small>{here}</small></p>",
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else "",
        *(_titled(grid.title, grid.html()) for grid in main),
        *_plots(result["systems"]),
        "<details><summary>All figures as tables</summary>",
        *(_titled(grid.title, grid.html()) for grid in all_grids(result)[len(main) :]),
        "</details>",
    ]
    return f'<!doctype html><html lang="en"><head>{_HEAD}</head><body>{"".join(parts)}</body></html>\n'


def _plots(systems: Sequence[Summary]) -> list[str]:
    series = _series(systems)
    parts = []
    for part in by_temperature(systems):
        suffix = temperature_suffix(part)
        speeds = {c: [s["categories"][c]["tokens_per_second"] for s in part] for c in part[0]["categories"]}
        plot = dot_plot(speeds, [series[s["system"]] for s in part], "tokens per second, end to end", "tok/s")
        parts.append(_plot(f"Speed by category{suffix}", plot))
        if drafting := [s for s in part if s["inside"] and s["inside"]["accepted_at"]]:
            shares = [s["inside"]["accepted_at"] for s in drafting]
            names = [series[s["system"]] for s in drafting]
            plot = line_plot(shares, names, "accepted depth, in draft tokens", "share of rounds")
            parts.append(_plot(f"Acceptance by depth{suffix}", plot))
    spent = {s["system"]: s["inside"]["milliseconds"] for s in systems if s["inside"]}
    phases = [Series(phase, i) for i, phase in enumerate(next(iter(spent.values())))]
    bars = {name: list(parts_ms.values()) for name, parts_ms in spent.items()}
    return [*parts, _plot("Time of a round", stacked_bars(bars, phases, "milliseconds per round", "ms"))]


def _series(systems: Sequence[Summary]) -> dict[str, Series]:
    """Choose a marker for each system: filled for Paceline, hollow for other programs, the same at all temperatures."""
    indices: dict[bool, dict[tuple[Any, ...], int]] = {False: {}, True: {}}
    series = {}
    for s in systems:
        other = s["program"] != "paceline"
        key = s["program"], s["drafter"], s["precision"], s["width"]
        index = indices[other].setdefault(key, len(indices[other]))
        series[s["system"]] = Series(s["system"], index, other)
    return series


def _plot(title: str, svg: str) -> str:
    return _titled(title, f"<div class=scroll>{svg}</div>")


def _titled(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"
