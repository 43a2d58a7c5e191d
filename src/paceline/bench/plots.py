"""Plots as SVG that stay readable at any width: places across are shares of it, sizes of text and marks are fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

COLOURS = (
    *("#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2"),
    *("#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0"),
)
"""Told apart on light and on dark ground; the palette of Observable Plot in an order of our own."""

_SHAPES = (
    '<circle r="5.5"/>',
    '<rect x="-5" y="-5" width="10" height="10"/>',
    '<path d="M0 -6.5L6.5 0L0 6.5L-6.5 0Z"/>',
)


@dataclass(frozen=True, slots=True)
class Mark:
    """How something looks in every plot. `place`: its number among its like, which choose colour, then shape."""

    name: str
    place: int
    hollow: bool = False

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    def shape(self) -> str:
        """Around the origin."""
        paint = f'fill="{"none" if self.hollow else self.colour}" stroke="{self.colour}" stroke-width="2"'
        return f"<g {paint}>{_SHAPES[self.place // len(COLOURS) % len(_SHAPES)]}</g>"


def legend(marks: Sequence[Mark]) -> str:
    """Which mark is whose."""
    keys = [
        f'<li><svg width="18" height="14" aria-hidden="true"><g transform="translate(8 7)">{m.shape()}</g></svg>'
        f"{escape(m.name)}</li>"
        for m in marks
    ]
    return f"<ul class=legend>{''.join(keys)}</ul>"


def dots(rows: Mapping[str, Sequence[float]], marks: Sequence[Mark], axis: str, unit: str) -> str:
    """A row per name, in it a mark per value, on one common scale from 0. `axis`: what the scale shows."""
    most, ticks = _scale(max((v for values in rows.values() for v in values), default=0.0))
    height = 40 * len(rows)
    parts = _across(ticks, most, height, axis)
    for i, (name, values) in enumerate(rows.items()):
        y = 40 * i
        parts.append(f'<text x="0" y="{y + 13}">{escape(name)}</text>')
        parts.append(f'<line x1="{_x(0)}" x2="{_x(1)}" y1="{y + 27}" y2="{y + 27}" class="thread"/>')
        for mark, value in zip(marks, values, strict=True):
            parts.append(_placed(mark, _x(value / most), y + 27, f"{mark.name}, {name}: {value:.1f} {unit}"))
    return _svg(height + 42, axis, parts)


def lines(series: Sequence[Sequence[float]], marks: Sequence[Mark], x_axis: str, y_axis: str) -> str:
    """A line per mark over 1, 2, 3, ...; values are shares."""
    deepest, height, top = max(len(values) for values in series), 240, 26
    places = [_x((d + 0.6) / (deepest + 0.1)) for d in range(deepest)]
    parts = [f'<text x="0" y="10">{escape(y_axis)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + (1 - share) * height
        parts.append(f'<line x1="0" x2="100%" y1="{y:.0f}" y2="{y:.0f}" class="grid"/>')
        parts.append(f'<text x="0" y="{y - 3:.0f}" class="tick">{share:.0%}</text>')
    for d, x in enumerate(places):
        parts.append(f'<text x="{x}" y="{top + height + 18}" class="tick" text-anchor="middle">{d + 1}</text>')
    parts.append(f'<text x="50%" y="{top + height + 38}" text-anchor="middle">{escape(x_axis)}</text>')
    for mark, values in zip(marks, series, strict=True):
        heights = [top + (1 - value) * height for value in values]
        ends = list(zip(places, heights, strict=False))
        parts += [
            f'<line x1="{a}" y1="{b:.1f}" x2="{c}" y2="{d:.1f}" stroke="{mark.colour}" stroke-width="2"/>'
            for (a, b), (c, d) in pairwise(ends)
        ]
        parts += [_placed(mark, x, y, f"{mark.name}, depth {i + 1}: {values[i]:.0%}") for i, (x, y) in enumerate(ends)]
    return _svg(top + height + 46, f"{y_axis} by {x_axis}", parts)


def stacks(bars: Mapping[str, Sequence[float]], marks: Sequence[Mark], axis: str, unit: str) -> str:
    """A bar per name, made of a part per mark."""
    most, ticks = _scale(1.15 * max((sum(values) for values in bars.values()), default=0.0))
    height = 42 * len(bars)
    parts = _across(ticks, most, height, axis)
    for i, (name, values) in enumerate(bars.items()):
        y, done = 42 * i, 0.0
        parts.append(f'<text x="0" y="{y + 13}">{escape(name)}</text>')
        for mark, value in zip(marks, values, strict=True):
            parts.append(
                f'<rect x="{_x(done / most)}" y="{y + 18}" width="{_WIDTH * value / most:.2f}%" height="16" '
                f'fill="{mark.colour}"><title>{escape(f"{name}, {mark.name}: {value:.2f} {unit}")}</title></rect>'
            )
            done += value
        parts.append(f'<text x="{_x(done / most)}" dx="5" y="{y + 31}">{done:.1f} {unit}</text>')
    return _svg(height + 42, axis, parts)


_LEFT, _WIDTH = 2.0, 95.0
"""Where the scale begins and how much of the width it takes, in percent."""


def _x(share: float) -> str:
    return f"{_LEFT + _WIDTH * share:.2f}%"


def _scale(most: float) -> tuple[float, list[float]]:
    """The end of a scale from 0 that holds `most`, and four to six round numbers along it."""
    if not most > 0:
        return 1.0, [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if most / (power * factor) <= 5)
    count = math.ceil(most / step)
    return count * step, [i * step for i in range(count + 1)]


def _across(ticks: Sequence[float], most: float, height: int, axis: str) -> list[str]:
    """Grid lines with their numbers below, and what they mean."""
    parts = []
    for tick in ticks:
        x = _x(tick / most)
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height + 4}" class="grid"/>')
        parts.append(f'<text x="{x}" y="{height + 18}" class="tick" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="50%" y="{height + 36}" text-anchor="middle">{escape(axis)}</text>')
    return parts


def _placed(mark: Mark, x: str, y: float, said: str) -> str:
    return f'<svg x="{x}" y="{y:.1f}" overflow="visible">{mark.shape()}<title>{escape(said)}</title></svg>'


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return f'<svg class="plot" height="{height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
