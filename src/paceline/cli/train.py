"""`paceline train`: a drafter for a target of your own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Quiet, progress_wanted
from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from paceline.train.loop import Report
    from paceline.train.progress import Progress
    from paceline.train.run import Listener

_DATA, _HEAD, _LOOP = "Data", "Drafter", "Training"


def train(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the drafter; DIR.work beside it is for work.")],
    target: Annotated[str, typer.Option("--target", "-m", help="The model to draft for, as for generate --model.")] = (
        "demo"
    ),
    kind: Annotated[str, typer.Option("--kind", "-k", help="eagle3, medusa, early-exit or block.")] = "eagle3",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSONL of prompts; without it the target makes its own.", rich_help_panel=_DATA),
    ] = None,
    own_prompts: Annotated[
        int, typer.Option("--own-prompts", min=1, help="How many it makes then.", rich_help_panel=_DATA)
    ] = 5000,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="JSONL of its answers; without it, it writes them.", rich_help_panel=_DATA),
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Longest answer, in tokens.", rich_help_panel=_DATA)
    ] = 192,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="An answer for each of these per prompt.", rich_help_panel=_DATA)
    ] = "0,0.8",
    documents: Annotated[
        int | None, typer.Option("--documents", min=1, help="Use so many answers at most.", rich_help_panel=_DATA)
    ] = None,
    cache: Annotated[
        float,
        typer.Option("--cache", min=0, help="GiB of hidden states to keep between epochs.", rich_help_panel=_DATA),
    ] = 8.0,
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", min=1, help="Tokens it can draft; without it, all.", rich_help_panel=_HEAD),
    ] = None,
    ffn: Annotated[
        int | None,
        typer.Option("--ffn", min=1, help="Feed-forward width; without it, the target's.", rich_help_panel=_HEAD),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="Before an early exit, or of a block drafter.", rich_help_panel=_HEAD),
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", min=1, help="Of an early exit's adapter.", rich_help_panel=_HEAD)
    ] = 256,
    layout: Annotated[
        str | None, typer.Option("--layout", help="speculators, sglang, reference, vllm...", rich_help_panel=_HEAD)
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Tokens of the drafts it learns to make.", rich_help_panel=_LOOP)
    ] = 5,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the data.", rich_help_panel=_LOOP)] = 1.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Documents per step.", rich_help_panel=_LOOP)] = 4,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate.", rich_help_panel=_LOOP)] = 2e-3,
    seed: Annotated[int, typer.Option("--seed", help="Of data, order and weights.", rich_help_panel=_LOOP)] = 0,
    quiet: Quiet = False,
) -> None:
    """Train a drafter for a target, on the target's own answers.

    Run the same command again to go on after an interruption: finished answers, hidden states and the last
    checkpoint are kept in DIR.work. Use the drafter with --drafter head:DIR.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    from paceline.llm import load
    from paceline.train import answers as writing
    from paceline.train import loop, run

    order = run.Order(
        target=target,
        kind=kind,
        out=out,
        prompts=prompts,
        answers=answers,
        own_prompts=own_prompts,
        documents=documents,
        vocabulary=vocabulary,
        ffn=ffn,
        layers=layers,
        rank=rank,
        steps=steps,
        cache=cache,
        layout=layout,
        mix=writing.Plan(_numbers(temperatures), answer_tokens, seed),
        plan=loop.Plan(epochs=epochs, batch=batch, rate=rate, seed=seed),
        command=shlex.join(["paceline", *sys.argv[1:]]),
    )
    run.check(order)
    shown = progress_wanted(quiet)
    llm = load(target, drafter=None, device=device, progress=shown)  # type: ignore[arg-type]
    with _Bars(shown) as bars:
        report = run.train(llm, order, bars.listener)
    if not quiet:
        typer.echo(
            f"{out}: {report.acceptance:.2f} tokens per round on held-out answers (greedy, chain of {steps})", err=True
        )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidOption(f"--temperatures {text!r} is no list of numbers", "Write them as 0,0.8") from None


class _Bars:
    """One bar per stage of a run, on stderr."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            "{task.description}",
            BarColumn(),
            "{task.percentage:>3.0f}%",
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("", total=None, note="")

    def __enter__(self) -> _Bars:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    @property
    def listener(self) -> Listener:
        from paceline.train.run import Listener

        return Listener(self._stage, self._writing, self._training)

    def _stage(self, name: str) -> None:
        self._bar.stop_task(self._task)
        self._task = self._bar.add_task(name, total=None, note="")

    def _writing(self, p: Progress) -> None:
        note = f"{p.tokens_per_second:.0f} tok/s" + (f", {p.skipped} skipped" if p.skipped else "")
        self._bar.update(self._task, completed=p.done, total=p.total, note=note)

    def _training(self, r: Report) -> None:
        note = f"loss {r.loss:.2f}  accuracy {' '.join(f'{a:.2f}'[1:] for a in r.accuracy)}"
        if r.acceptance is not None:
            note += f"  held out {r.acceptance:.2f} tokens/round"
        self._bar.update(self._task, completed=r.documents, total=r.total, note=note)
