"""A run as one page that needs nothing else: speed by category, acceptance by depth, where a round's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951"),
    *("#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0"),
)
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}
.key{display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 1em;border-radius:2px}
code,small{opacity:.75;overflow-wrap:anywhere}
"""

_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    f"<title>paceline bench</title><style>{_STYLE}</style>"
)

_WIDTH = 900


def page(result: Mapping[str, Any]) -> str:
    """HTML of a result as `cli/bench.py` makes it."""
    systems, source = result["systems"], result["provenance"]
    parts = [
        f"<h1>paceline bench: {escape(str(source['settings']['model']))}</h1>",
        f"<p><code>{escape(source['command'])}</code><br><small>{escape(_where(source))}</small></p>",
        _table(systems),
        "<h2>Speed by category</h2><p>End-to-end tokens per second.</p>",
        _keys([s["system"] for s in systems]),
        _bars(
            {c: [s["categories"][c]["tokens_per_second"] for s in systems] for c in systems[0]["categories"]},
            "tok/s",
        ),
    ]
    drafting = [s for s in systems if s["inside"] and any(s["inside"]["accepted_at"])]
    if drafting:
        parts += [
            "<h2>Acceptance by depth</h2><p>Share of rounds that kept a draft to this depth.</p>",
            _keys([s["system"] for s in drafting], systems),
            _lines([s["inside"]["accepted_at"] for s in drafting], [_colour(systems, s["system"]) for s in drafting]),
        ]
    ours = [s for s in systems if s["inside"]]
    if ours:
        phases = list(ours[0]["inside"]["milliseconds"])
        parts += [
            "<h2>A round's time</h2><p>Milliseconds per round.</p>",
            _keys(phases),
            _stacks({s["system"]: list(s["inside"]["milliseconds"].values()) for s in ours}),
        ]
    if result["missing"]:
        parts.append("<p>Not measured: " + escape("; ".join(result["missing"])) + "</p>")
    return f"<!doctype html><html lang=en>{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _where(source: Mapping[str, Any]) -> str:
    machine = source["machine"]
    used = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
    return f"{source['date']}; {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; {used}"


def _table(systems: Sequence[Mapping[str, Any]]) -> str:
    over = f"x {systems[0]['system']}"
    columns = ["system", "tok/s", "decode tok/s", "first token, ms", over, "95 %", "tokens/round"]
    rows = []
    for s in systems:
        ratio, inside = s["ratio"], s["inside"]
        cells = [
            s["system"],
            f"{s['tokens_per_second']:.1f}",
            f"{s['decode_tokens_per_second']:.1f}",
            f"{1e3 * s['first_token_seconds']:.0f}",
            f"{ratio['median']:.2f}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            f"{inside['tokens_per_round']:.2f}" if inside else "",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{''.join(f'<th>{escape(c)}</th>' for c in columns)}</tr>{''.join(rows)}</table>"


def _colour(systems: Sequence[Mapping[str, Any]], name: str) -> str:
    return _COLOURS[[s["system"] for s in systems].index(name) % len(_COLOURS)]


def _keys(names: Sequence[str], systems: Sequence[Mapping[str, Any]] | None = None) -> str:
    colours = [_colour(systems, n) if systems else _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names)]
    keys = [f'<span class=key style="background:{c}"></span>{escape(n)}' for c, n in zip(colours, names, strict=True)]
    return f"<p>{''.join(keys)}</p>"


def _bars(groups: Mapping[str, Sequence[float]], unit: str) -> str:
    """Horizontal bars, a group per category."""
    most = max((v for values in groups.values() for v in values), default=1.0) or 1.0
    marks, y = [], 0.0
    for name, values in groups.items():
        marks.append(f'<text x="0" y="{y + 7 * len(values):.0f}">{escape(name)}</text>')
        for i, value in enumerate(values):
            width = (_WIDTH - 230) * value / most
            colour = _COLOURS[i % len(_COLOURS)]
            marks.append(f'<rect x="150" y="{y:.0f}" width="{width:.1f}" height="11" fill="{colour}" rx="2"/>')
            marks.append(f'<text x="{156 + width:.1f}" y="{y + 10:.0f}">{value:.0f} {unit}</text>')
            y += 14
        y += 10
    return _svg(y, marks)


def _lines(series: Sequence[Sequence[float]], colours: Sequence[str]) -> str:
    """One line per system over depth 1, 2, ..."""
    depth, height, left = max(len(s) for s in series), 260, 40
    step = (_WIDTH - left - 20) / max(depth - 1, 1)
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 10 + (1 - share) * height
        marks.append(f'<line x1="{left}" x2="{_WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#8884"/>')
        marks.append(f'<text x="0" y="{y + 4:.0f}">{share:.2f}</text>')
    marks += [f'<text x="{left + d * step:.0f}" y="{height + 28}">{d + 1}</text>' for d in range(depth)]
    for values, colour in zip(series, colours, strict=True):
        points = [(left + d * step, 10 + (1 - value) * height) for d, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    return _svg(height + 36, marks)


def _stacks(groups: Mapping[str, Sequence[float]]) -> str:
    """One bar per system, its parts side by side."""
    most = max((sum(values) for values in groups.values()), default=1.0) or 1.0
    marks, y = [], 0.0
    for name, values in groups.items():
        marks.append(f'<text x="0" y="{y + 14:.0f}">{escape(name)}</text>')
        x = 200.0
        for i, value in enumerate(values):
            width = (_WIDTH - 280) * value / most
            colour = _COLOURS[i % len(_COLOURS)]
            marks.append(f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="18" fill="{colour}"/>')
            x += width
        marks.append(f'<text x="{x + 6:.1f}" y="{y + 14:.0f}">{sum(values):.1f} ms</text>')
        y += 26
    return _svg(y, marks)


def _svg(height: float, marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(marks)}</svg>'
