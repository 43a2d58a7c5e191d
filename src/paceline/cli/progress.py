"""Progress of a training run: a bar on a terminal, one line per minute elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.cli.options import progress_wanted
from paceline.train.run import Listener

if TYPE_CHECKING:
    from paceline.train import loop, writing

_INTERVAL = 60.0
"""Seconds between two lines."""


class TrainingProgress:
    """Bar on stderr for the current stage of a run."""

    def __init__(self, quiet: bool) -> None:
        self._has_bar = progress_wanted(quiet)
        self._printed = float("inf") if quiet else -_INTERVAL
        self._stage_name = ""
        self._bar = Progress(
            "{task.description}",
            BarColumn(bar_width=20),
            "{task.percentage:>3.0f}%",
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not self._has_bar,
        )
        self._task = self._bar.add_task("starting", total=None, note="")
        self.listener = Listener(self._stage, self._writing, self._training)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _stage(self, name: str) -> None:
        self._stage_name = name
        self._bar.update(self._task, description=name, completed=0, total=None, note="")

    def _writing(self, p: writing.Progress) -> None:
        note = f"{p.tokens_per_second:.0f} tok/s" + (f", {p.skipped} skipped" if p.skipped else "")
        self._show(p.done, p.total, note)

    def _training(self, r: loop.Report) -> None:
        note = f"loss {r.loss:.2f}, accuracy {' '.join(f'{a:.2f}' for a in r.accuracy)}"
        if r.acceptance is not None:
            note += f", held out {r.acceptance:.2f} tokens/round"
        self._show(r.documents, r.total, note)

    def _show(self, done: int, total: int, note: str) -> None:
        self._bar.update(self._task, completed=done, total=total, note=note)
        if not self._has_bar and time.monotonic() - self._printed >= _INTERVAL:
            self._printed = time.monotonic()
            typer.echo(f"{self._stage_name}: {done} of {total}, {note}", err=True)
