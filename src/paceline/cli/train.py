"""`paceline train`: a drafter for a target of your own."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.cli.options import Quiet, progress_wanted, set_threads
from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.train.loop import Report
    from paceline.train.run import TrainJob

Number = TypeVar("Number", int, float)

_DATA, _HEAD, _LOOP = "Data", "Drafter", "Training"

_ORDERED = (
    *("prompts", "answers", "own_prompts", "documents", "max_length", "cache"),
    *("start", "vocabulary", "ffn", "layers", "rank", "steps"),
)
"""Options that an `TrainJob` knows by the same name."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What it learns from, what it is made of and how it is trained."""

    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSONL of prompts; without it the target makes its own.", rich_help_panel=_DATA),
    ] = None
    own_prompts: Annotated[
        int, typer.Option("--own-prompts", min=1, help="How many it makes then.", rich_help_panel=_DATA)
    ] = 5000
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="JSONL of its answers; without it, it writes them.", rich_help_panel=_DATA),
    ] = None
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Longest answer, in tokens.", rich_help_panel=_DATA)
    ] = 192
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="An answer for each of these per prompt.", rich_help_panel=_DATA)
    ] = "0,0.8"
    documents: Annotated[
        int | None, typer.Option("--documents", min=1, help="Use so many answers at most.", rich_help_panel=_DATA)
    ] = None
    max_length: Annotated[
        int, typer.Option("--max-length", min=16, help="Tokens of a document, at most.", rich_help_panel=_DATA)
    ] = 2048
    cache: Annotated[
        float,
        typer.Option("--cache", min=0, help="GiB of hidden states to keep between epochs.", rich_help_panel=_DATA),
    ] = 8.0
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Begin with the weights of this drafter, of like shape.", rich_help_panel=_HEAD),
    ] = None
    taps: Annotated[
        str | None,
        typer.Option("--taps", help="Layers it listens to, as 2,15,27.", rich_help_panel=_HEAD),
    ] = None
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", min=1, help="Tokens it can draft; without it, all.", rich_help_panel=_HEAD),
    ] = None
    ffn: Annotated[
        int | None,
        typer.Option("--ffn", min=1, help="Feed-forward width; without it, the target's.", rich_help_panel=_HEAD),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", min=1, help="Before an exit; of a block drafter or Medusa head.", rich_help_panel=_HEAD
        ),
    ] = None
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of an early exit's adapter.", rich_help_panel=_HEAD)] = 256
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Tokens of the drafts it learns to make.", rich_help_panel=_LOOP)
    ] = 5
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the data.", rich_help_panel=_LOOP)] = 1.0
    batch: Annotated[int, typer.Option("--batch", min=1, help="Documents per step.", rich_help_panel=_LOOP)] = 4
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.", rich_help_panel=_LOOP)] = 2e-3
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of data, order and weights.", rich_help_panel=_LOOP)
    ] = 0

    def order(self, target: str, kind: str, out: Path) -> TrainJob:
        """All of it in the library's terms. Raises `InvalidOption`."""
        from paceline.train import answers, loop, run

        chosen: dict[str, Any] = {name: getattr(self, name) for name in _ORDERED}
        return run.TrainJob(
            target,
            kind,
            out,
            **chosen,
            taps=None if self.taps is None else _listed(self.taps, int, "--taps {} are no layers", "2,15,27"),
            mix=answers.AnswerPlan(
                _listed(self.temperatures, float, "--temperatures {} is no list of numbers", "0,0.8"),
                self.answer_tokens,
                self.seed,
            ),
            plan=loop.TrainPlan(epochs=self.epochs, batch=self.batch, rate=self.rate, seed=self.seed),
            command=shlex.join(["paceline", *sys.argv[1:]]),
        )


def train(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the drafter; DIR.work beside it is for work.")],
    target: Annotated[
        str, typer.Option("--target", "-m", help="The model to draft for, as for generate --model.")
    ] = "demo",
    kind: Annotated[str, typer.Option("--kind", "-k", help="eagle3, medusa, early-exit or block.")] = "eagle3",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    options: TrainOptions,
    quiet: Quiet = False,
) -> None:
    """Train a drafter for a target, on the target's own answers.

    Run the same command again to go on after an interruption: finished answers, hidden states and the last
    checkpoint are kept in DIR.work. Use the drafter with --drafter head:DIR.
    """
    # oneDNN keeps what it prepared for the last 1024 shapes of each kind, a few MB apiece, and no two batches are
    # alike: 5 GB in half an hour. Preparing anew costs nothing beside a product. Read when torch is imported.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    order = options.order(target, kind, out)
    from paceline.cli.progress import Bars
    from paceline.llm import load
    from paceline.train import run

    run.check(order)
    set_threads(threads)
    llm = load(target, drafter=None, device=device, progress=progress_wanted(quiet))  # type: ignore[arg-type]
    with Bars(quiet) as bars:
        report = run.train(llm, order, bars.listener)
    if not quiet:
        typer.echo(f"{out}: {_measured(report, options.steps)}", err=True)


def _measured(report: Report, steps: int) -> str:
    if report.acceptance is None:
        return "trained, and not measured, since none of so few prompts were held out"
    return f"{report.acceptance:.2f} tokens per round on held-out answers (greedy, chain of {steps})"


def _listed(text: str, number: Callable[[str], Number], cause: str, example: str) -> tuple[Number, ...]:
    """What stands between the commas. `cause`: what is wrong where that is no number, {} being the text."""
    try:
        return tuple(number(part) for part in text.split(","))
    except ValueError:
        raise InvalidOption(cause.format(repr(text)), f"Write them as {example}") from None
