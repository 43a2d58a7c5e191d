"""A run as one page that needs nothing else: speed by category, acceptance by depth, where a round's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.bench.plots import Mark, dots, legend, lines, stacks
from paceline.bench.tables import Summary, all_grids, at, by_temperature, main_grids, where

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;line-height:1.25;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .3rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap;font-weight:400}
thead th{font-weight:600}
th:first-child{position:sticky;left:0;background:Canvas}
td:first-child,th:first-child{text-align:left;padding-left:0}
.plot{width:100%;display:block;margin:.6rem 0 0;overflow:visible}
.plot text{font:13px system-ui,sans-serif;fill:currentColor}
.plot .tick{opacity:.75}
.grid{stroke:#8883}
.thread{stroke:#8885;stroke-dasharray:2 4}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:.4rem 0;padding:0}
.legend svg{margin-right:.25rem;vertical-align:-1px}
code,small{opacity:.8;overflow-wrap:anywhere}
summary{cursor:pointer;margin-top:2rem}
"""

_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>paceline bench</title><style>{_STYLE}</style>"
)


def page(result: Mapping[str, Any]) -> str:
    """HTML of a result of `run`."""
    systems, source = result["systems"], result["provenance"]
    said = [*result["findings"], *(f"not measured: {line}" for line in result["missing"])]
    here = f"{source['date']}; {where(source)}"
    parts = [
        f"<h1>paceline bench: {escape(Path(source['settings']['model']).name)}</h1>",
        f"<p><code>{escape(source['command'])}</code><br><small>{escape(here)}</small></p>",
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>" if said else "",
        *(_titled(grid.title, grid.html()) for grid in main_grids(result)),
        *_plots(systems),
        "<details><summary>All figures as tables</summary>",
        *(_titled(grid.title, grid.html()) for grid in all_grids(result)[len(main_grids(result)) :]),
        "</details>",
    ]
    return f'<!doctype html><html lang="en"><head>{_HEAD}</head><body>{"".join(parts)}</body></html>\n'


def _plots(systems: Sequence[Summary]) -> list[str]:
    marks = _marks(systems)
    parts = []
    for part in by_temperature(systems):
        warm = at(part)
        parts.append(_titled(f"Speed by category{warm}", _speeds(part, marks)))
        kept = [(s["inside"]["accepted_at"], marks[s["system"]]) for s in part if s["inside"]]
        kept = [(shares, mark) for shares, mark in kept if shares]
        if kept:
            series, drafting = zip(*kept, strict=True)
            drawn = lines(series, drafting, "depth, in drafted tokens", "rounds that kept a draft to this depth")
            parts.append(_titled(f"Acceptance by depth{warm}", legend(drafting) + drawn))
    return [*parts, _titled("Where a round's time goes", _rounds([s for s in systems if s["inside"]]))]


def _speeds(part: Sequence[Summary], marks: Mapping[str, Mark]) -> str:
    used = [marks[s["system"]] for s in part]
    speeds = {c: [s["categories"][c]["tokens_per_second"] for s in part] for c in part[0]["categories"]}
    return legend(used) + dots(speeds, used, "tokens per second, end to end", "tok/s")


def _rounds(own: Sequence[Summary]) -> str:
    spent = {s["system"]: s["inside"]["milliseconds"] for s in own}
    phases = [Mark(phase, i) for i, phase in enumerate(next(iter(spent.values())))]
    bars = {name: list(parts.values()) for name, parts in spent.items()}
    return legend(phases) + stacks(bars, phases, "milliseconds per round", "ms")


def _marks(systems: Sequence[Summary]) -> dict[str, Mark]:
    """Filled for Paceline's, hollow for the other programs'; one that is measured at several temperatures has one."""
    places: dict[bool, dict[tuple[str, ...], int]] = {False: {}, True: {}}
    marks = {}
    for s in systems:
        other = s["program"] != "paceline"
        like = places[other]
        place = like.setdefault((s["program"], s["drafter"], s["precision"]), len(like))
        marks[s["system"]] = Mark(s["system"], place, other)
    return marks


def _titled(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"
