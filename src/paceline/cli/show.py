"""Showing replies, statistics and tables in the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO

from paceline.cli.prompt_progress import with_progress
from paceline.cli.wrapping import Piece, WordWrap, say

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.engine.detokenizer import Chunk
    from paceline.engine.results import Completion, Stream
    from paceline.engine.stats import Stats
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling
    from paceline.types import Prompt

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"

# A model may write escape sequences, which a terminal would obey.
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


def has_colour(file: TextIO) -> bool:
    """Return True if `file` is a terminal with colours. See https://no-color.org."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Display:
    """Writes a reply chunk by chunk.

    A file or pipe gets plain text. On a terminal, lines are broken between words, and accepted draft tokens are green.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._wrap = WordWrap() if file.isatty() else None
        self._colour = has_colour(file)
        self._line_is_open = False

    def write(self, chunk: Chunk) -> None:
        """Show one chunk. The last word of a line waits until it is complete."""
        self.text(chunk.text, green=chunk.drafted)

    def text(self, text: str, green: bool = False) -> None:
        """Show a piece of text. See `write`."""
        if not text:
            return
        self._line_is_open = not text.endswith("\n")
        if self._wrap is None:
            self._put([Piece(text, green)])
        else:
            self._put(self._wrap.add(Piece(text.translate(_CONTROLS), green)))

    def end(self) -> None:
        """End the last line if necessary."""
        if self._line_is_open:
            self._put([*(self._wrap.rest() if self._wrap else ()), Piece("\n", False)])
            self._wrap = self._wrap and WordWrap()
        self._line_is_open = False

    def _put(self, pieces: Sequence[Piece]) -> None:
        for green, group in groupby(pieces, lambda piece: piece.green):
            text = "".join(piece.text for piece in group)
            self._file.write(f"{_GREEN}{text}{_PLAIN}" if self._colour and green else text)
        self._file.flush()


def stream_reply(
    llm: LLM, prompt: Prompt, sampling: Sampling, file: TextIO, raw: bool = False, progress: bool = False
) -> Completion:
    """Generate a reply and show it as it is written. `progress`: Show the progress of a long prompt on stderr."""
    with llm.stream(prompt, sampling, raw=raw) as stream:
        show_stream(stream, file, progress)
    return stream.completion


def show_stream(stream: Stream, file: TextIO, progress: bool) -> None:
    """Show a reply as it is written."""
    display = Display(file)
    try:
        for chunk in with_progress(stream, progress):
            display.write(chunk)
    finally:
        display.end()


def facts_table(rows: Iterable[tuple[str, str]], **settings: Any) -> Table:
    """Return a table of (name, value) pairs. `settings` are arguments of `rich.table.Table`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, **settings)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def print_figures(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
    least: int = 2,
) -> None:
    """Print a table with names in the first column and figures in all others, the most important ones first.

    If the terminal is too narrow, the last columns are omitted, and a line names them. Names are never cut.

    Args:
        columns: Headings.
        rows: Cells of each row.
        title: Title above the table.
        caption: Caption below the table.
        least: Minimum number of columns to show.
    """
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160)
    widest = console.options.update(max_width=10_000)
    shown = len(columns)
    while True:
        table = _figures_table(columns[:shown], rows, caption=caption)
        if shown <= least or console.measure(table, options=widest).maximum <= console.width:
            break
        shown -= 1
    if title:
        console.print(title, style="bold", markup=False, highlight=False)
    console.print(table)
    if shown < len(columns):
        say(f"A wider terminal also shows: {' | '.join(columns[shown:])}", err=False)


def _figures_table(columns: Sequence[str], rows: Sequence[Sequence[str]], **settings: Any) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(**settings)
    for i, heading in enumerate(columns):
        width = max(map(len, [*heading.split(), *(row[i] for row in rows)]))
        heading = fill(heading, width, break_long_words=False, break_on_hyphens=False)
        if i:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[: len(columns)]))
    return table


def speed(stats: Stats) -> float:
    """Return tokens per second, end to end."""
    return _rate(stats.tokens, sum(stats.seconds.values()))


def decode_speed(stats: Stats) -> float:
    """Return tokens per second, excluding the prefill."""
    return _rate(stats.tokens, sum(stats.seconds.values()) - stats.seconds["prefill"])


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def percent(share: float) -> str:
    """Return a share such as 0.42 as "42 %"."""
    return "<1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def amount(size: float, unit: str = "") -> str:
    """Return a rounded number: "135 million", or "98.4 MB" if `unit` is "bytes"."""
    steps = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if unit else (("billion", 1e9), ("million", 1e6))
    name, step = next(((name, step) for name, step in steps if size >= step), (unit, 1.0))
    number = f"{size / step:.3g}" if size < 100 * step else f"{size / step:,.0f}"
    return f"{number} {name}".rstrip()


def loaded_line(name: str, llm: LLM) -> str:
    """Describe a loaded model: its name, its drafter and, if psutil is installed, the memory of this process."""
    about = f"{name} (drafter: {llm.drafter})"
    if find_spec("psutil") is None:
        return about
    import psutil

    return f"{about}, {amount(psutil.Process().memory_info().rss, 'bytes')} of memory"


def summary(reply: Completion, sampling: Sampling, more: str = "raise -n") -> str:
    """Return a line of statistics: length, speed, gain from speculation, seed, guarantee, and the limit that was hit.

    `more` tells the user how to get longer replies.
    """
    stats = reply.stats
    parts = [f"{stats.tokens} tokens", f"{speed(stats):.1f} tok/s", f"{stats.tokens_per_round:.2f} tokens per round"]
    if stats.drafter is not None:
        accepted = f"{percent(stats.acceptance)} of {stats.drafted} drafted accepted"
        parts.append(f"{stats.drafter}: {accepted if stats.drafted else 'nothing drafted'}")
    if sampling.temperature > 0:
        parts.append(f"seed {stats.seed}")
    if stats.guarantee == "lossy":
        parts.append("lossy: this is not the target's own text")
    if cut := length_limit(reply, sampling, more):
        parts.append(cut)
    return " · ".join(parts)


def length_limit(reply: Completion, sampling: Sampling, more: str = "raise -n") -> str:
    """Return the limit that cut off the reply, and how to raise it. Empty for a reply that ended normally."""
    if reply.finish_reason != "length":
        return ""
    full = reply.stats.tokens < sampling.max_new_tokens
    return f"cut at {reply.stats.tokens} tokens" + (": the model's context is full" if full else f"; {more}")


def sampling_line(sampling: Sampling, given: Mapping[str, Any]) -> str:
    """Describe the current parameters: first the ones given on the command line, then the model's recommendations."""
    from paceline.sampling.parameters import RECOMMENDED, Sampling

    plain = Sampling()
    values = {name: getattr(sampling, name) for name in RECOMMENDED}
    applied = {name: f"{name} {value:g}" for name, value in values.items() if value != getattr(plain, name)}
    user = ", ".join(text for name, text in applied.items() if name in given)
    model = ", ".join(text for name, text in applied.items() if name not in given)
    return "; ".join(part for part in (user, f"from the model: {model}" if model else "") if part)


_RANDOM = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "seed": None,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
}
"""Parameters without effect on greedy text -> values that turn them off."""


def ignored_line(given: Mapping[str, Any]) -> str:
    """Return a line that names given options without effect on greedy text. Empty if there are none."""
    ignored = [f"--{name.replace('_', '-')}" for name, off in _RANDOM.items() if given.get(name, off) != off]
    verb = "has" if len(ignored) == 1 else "have"
    return f"{', '.join(ignored)} {verb} no effect: decoding is greedy; set -t" if ignored else ""
