"""`paceline train`: training a drafter for your own target."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.commands import option, options_of
from paceline.cli.options import Device, Quiet, Threads, parse_numbers, progress_wanted, set_threads
from paceline.kernels.torch_variables import TRAINING, set_unless_given

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.train.kinds import TrainJob
    from paceline.train.loop import Report
    from paceline.train.run import Listener
    from paceline.train.writing import Progress as Written

_data = options_of("Data")
_drafter = options_of("Drafter")
_training = options_of("Training")
_INTERVAL = 60.0
"""Seconds between lines of progress if stderr is not a terminal."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Data, shape of the drafter, and training."""

    prompts: Path | None = _data("JSONL file of prompts.", metavar="FILE", show_default="the target writes its own")
    own_prompts: int = _data("Number of prompts that the target writes without --prompts.", min=1, default=5000)
    answers: Path | None = _data("JSONL file of the target's answers.", metavar="FILE", show_default="it writes them")
    answer_tokens: int = _data("Maximum length of an answer, in tokens.", min=1, default=192)
    temperatures: str = _data(
        "Temperatures of answers. Each prompt gets one answer at each.", metavar="X,X", default="0,0.8"
    )
    documents: int | None = _data("Maximum number of answers to use.", min=1, show_default="all")
    max_length: int = _data("Maximum length of a document (prompt and answer), in tokens.", min=16, default=2048)
    cache: float = _data("Maximum size of hidden states on disk between epochs, in GiB.", min=0, default=8.0)
    start: Path | None = _drafter("Start from the weights of this drafter of the same shape.", "--from", metavar="DIR")
    taps: str | None = _drafter("Target layers whose hidden states the drafter reads, such as 2,15,27.", metavar="N,N")
    vocabulary: int | None = _drafter("Tokens that the drafter can draft.", min=1, show_default="all")
    ffn: int | None = _drafter("Feed-forward width.", min=1, show_default="the target's")
    layers: int | None = _drafter("Number of layers in a block drafter or Medusa head, or before an early exit.", min=1)
    rank: int | None = _drafter(
        "Rank of an early exit's projection, or of a block drafter's Markov head.",
        min=1,
        show_default="256 for early-exit, no Markov head",
    )
    bits: int = _drafter("Bits per weight in the file: 16 (bfloat16), or 4 (only Paceline reads it).", default=16)
    steps: int = _training("Draft length to train for, in tokens.", min=1, default=5)
    epochs: float = _training("Passes over the data.", default=1.0)
    batch: int = _training("Documents per step.", min=1, default=4)
    rate: float = _training("Learning rate.", default=2e-3)
    seed: int = _training("Seed for the data, their order and the weights.", min=0, max=2**63 - 1, default=0)

    def job(self, target: str, kind: str, out: Path) -> TrainJob:
        """Return the training job. Raise `InvalidOption` if an option is not valid."""
        from paceline.train import answers, kinds, loop

        fields = asdict(self)
        taps = fields.pop("taps")
        temperatures = parse_numbers("--temperatures", fields.pop("temperatures"), float, "0,0.8")
        return kinds.TrainJob(
            target,
            kind,
            out,
            taps=None if taps is None else parse_numbers("--taps", taps, int, "2,15,27"),
            mix=answers.AnswerPlan(temperatures, fields.pop("answer_tokens"), self.seed),
            plan=loop.TrainPlan(**{name: fields.pop(name) for name in ("epochs", "batch", "rate", "seed")}),
            command=shlex.join(["paceline", *sys.argv[1:]]),
            **fields,
        )


def train(
    *,
    out: Annotated[Path, option("Folder for the drafter. DIR.work keeps unfinished work.", "-o", metavar="DIR")],
    target: Annotated[str, option("Model to draft for, as for generate --model.", "-m", metavar="MODEL")] = "demo",
    kind: Annotated[str, option("eagle3, medusa, early-exit or block.", "-k", metavar="KIND")] = "eagle3",
    device: Device = "auto",
    threads: Threads = None,
    options: TrainOptions,
    quiet: Quiet = False,
) -> None:
    """Train a drafter on the target's own answers.

    Repeat the same command to continue after an interruption: DIR.work keeps finished answers, hidden states and the
    last checkpoint. Use the drafter with --drafter head:DIR.
    """
    set_unless_given(TRAINING)
    job = options.job(target, kind, out)
    from paceline.llm import load
    from paceline.train import run

    run.check(job)
    set_threads(threads)
    shown = progress_wanted(quiet)
    llm = load(target, drafter=None, device=device, prefix_memory=0, progress=shown)  # type: ignore[arg-type]
    with _progress(quiet) as listener:
        acceptance = run.train(llm, job, listener).acceptance
    if not quiet:
        measured = "not measured, since there were too few prompts to hold one out"
        if acceptance is not None:
            measured = f"{acceptance:.2f} tokens per round on held-out answers (greedy, chain of {options.steps})"
        typer.echo(f"{out}: {measured}", err=True)


@dataclass(slots=True)
class _TimeLeft:
    """Estimates the remaining time of a stage from its progress since the first report."""

    began: float = 0.0
    first: int | None = None

    def after(self, done: int, total: int, now: float) -> str:
        """Return the remaining time, such as "12 min left, ", or "" while it is unknown. `now` is in seconds."""
        if self.first is None:
            self.began, self.first = now, done
        if done <= self.first:
            return ""
        minutes = (now - self.began) / (done - self.first) * (total - done) / 60
        return f"{minutes:.0f} min left, "


@contextmanager
def _progress(quiet: bool) -> Iterator[Listener]:
    """Show progress on stderr: a bar for the current stage on a terminal, otherwise a line per minute."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from paceline.train.run import Listener

    has_bar, stage_name = progress_wanted(quiet), ""
    left = _TimeLeft()
    printed = float("inf") if quiet else -_INTERVAL
    columns = ("{task.description}", BarColumn(bar_width=20), "{task.percentage:>3.0f}%")
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    bar = Progress(*columns, *times, console=Console(stderr=True), disable=not has_bar)
    task = bar.add_task("starting", total=None, note="")

    def stage(name: str) -> None:
        nonlocal stage_name, left
        stage_name, left = name, _TimeLeft()
        bar.update(task, description=name, completed=0, total=None, note="")

    def writing(p: Written) -> None:
        show(p.done, p.total, f"{p.tokens_per_second:.0f} tok/s" + (f", {p.skipped} skipped" if p.skipped else ""))

    def training(r: Report) -> None:
        note = f"loss {r.loss:.2f}, accuracy {' '.join(f'{a:.2f}' for a in r.accuracy)}"
        if r.acceptance is not None:
            note += f", held out {r.acceptance:.2f} tokens/round"
        show(r.documents, r.total, note)

    def show(done: int, total: int, note: str) -> None:
        nonlocal printed
        bar.update(task, completed=done, total=total, note=note)
        rest = left.after(done, total, time.monotonic())
        if not has_bar and time.monotonic() - printed >= _INTERVAL:
            printed = time.monotonic()
            typer.echo(f"{stage_name}: {done} of {total}, {rest}{note}", err=True)

    with bar:
        yield Listener(stage, writing, lambda done, total: show(done, total, "documents"), training)
