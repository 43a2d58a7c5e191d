"""Plots of a report as SVG text, drawn by matplotlib (extra `bench`). The same input always gives the same text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOption, install_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (
    *("#4269d0", "#ff725c", "#3ca951", "#d9a00f", "#a463f2"),
    *("#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0"),
)
"""Distinguishable on light and dark backgrounds, based on the palette of Observable Plot."""
_INK, _FAINT = "#010203", "#010204"
"""Placeholders that are replaced by the page's text colour."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _FAINT,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Series:
    """A system or a phase, which looks the same in every plot.

    Attributes:
        name: Name in the legend.
        index: Number of the colour and marker.
        hollow: True for hollow markers, which mark other programs.
    """

    name: str
    index: int
    hollow: bool = False

    @property
    def colour(self) -> str:
        return _COLOURS[self.index % len(_COLOURS)]

    @property
    def marker(self) -> dict[str, Any]:
        """Options for matplotlib's `plot`."""
        shape = "osD^v"[self.index // len(_COLOURS) % 5]
        return {"marker": shape, "color": self.colour, "markerfacecolor": "none" if self.hollow else self.colour}


def require_matplotlib() -> None:
    """Raise `InvalidOption` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        fix = f"Install it: {install_line('bench')}"
        raise InvalidOption("an HTML report needs matplotlib, which is not installed", fix)


def dot_plot(rows: Mapping[str, Sequence[float]], series: Sequence[Series], axis: str, unit: str) -> str:
    """Draw a row for each name with a dot for each series, on a scale that begins at 0 and is labelled `axis`."""

    def draw(axes: Axes) -> None:
        for y, (name, values) in enumerate(rows.items()):
            for one, value in zip(series, values, strict=True):
                tip = f"tip:{one.name}, {name}: {value:.1f} {unit}"
                axes.plot([value], [y], linestyle="", gid=tip, label="" if y else one.name, **one.marker)
        _name_rows(axes, list(rows), axis)

    return _svg(axis, 0.32 * len(rows) + 0.5, series, draw)


def line_plot(lines: Sequence[Sequence[float]], series: Sequence[Series], x_axis: str, y_axis: str) -> str:
    """Draw a line of shares over 1, 2, 3, ... for each series."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        for one, shares in zip(series, lines, strict=True):
            axes.plot(range(1, len(shares) + 1), shares, color=one.colour)
            for depth, share in enumerate(shares, 1):
                tip = f"tip:{one.name}, depth {depth}: {share:.0%}"
                axes.plot([depth], [share], gid=tip, linestyle="", label=one.name if depth == 1 else "", **one.marker)
        axes.set(xlabel=x_axis, ylabel=y_axis, ylim=(0, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return _svg(f"{y_axis} by {x_axis}", 3.0, series, draw)


def stacked_bars(bars: Mapping[str, Sequence[float]], series: Sequence[Series], axis: str, unit: str) -> str:
    """Draw a bar for each name, stacked from a part for each series and labelled with its sum."""

    def draw(axes: Axes) -> None:
        for y, (name, values) in enumerate(bars.items()):
            for i, (one, value) in enumerate(zip(series, values, strict=True)):
                tip = f"tip:{name}, {one.name}: {value:.2f} {unit}"
                axes.barh(y, value, 0.6, sum(values[:i]), color=one.colour, gid=tip, label="" if y else one.name)
            axes.text(sum(values), y, f" {sum(values):.1f} {unit}", va="center")
        axes.margins(x=0.12)
        _name_rows(axes, list(bars), axis)

    return _svg(axis, 0.34 * len(bars) + 0.5, series, draw)


def _name_rows(axes: Axes, names: Sequence[str], axis: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=axis, ylim=(len(names) - 0.5, -0.5))
    axes.set_xlim(left=0)


def _svg(title: str, height: float, series: Sequence[Series], draw: Any) -> str:
    """Draw axes of `height` inches below a legend. A group id that starts with "tip:" becomes a tooltip."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = max(1, min(4, 90 // (6 + max(len(one.name) for one in series))))
    with rc_context(_STYLE):
        legend = 0.2 * -(-len(series) // columns) + 0.1
        figure: Figure = Figure(figsize=(10, height + legend + 0.4), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        figure.legend(loc="outside upper left", ncols=columns)
        out = StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=empty)
    return _embeddable(out.getvalue(), title)


def _embeddable(svg: str, title: str) -> str:
    """Return only the SVG element, in the page's text colour, and without ids that would clash with another plot."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r'<g id="tip:([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = svg.replace(_INK, "currentColor").replace(_FAINT, "color-mix(in srgb, currentColor 25%, transparent)")
    return svg.replace("<svg ", f'<svg class="plot" role="img" aria-label="{title}" ', 1).rstrip()
