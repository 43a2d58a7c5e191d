"""`paceline generate`: one prompt, or a file of them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from paceline.cli.failures import complain
from paceline.cli.options import LoadOptions, Quiet, SamplingOptions, progress_wanted
from paceline.cli.prompts import STDIN, Row, read_rows, single_prompt
from paceline.cli.show import Display, summary
from paceline.errors import InvalidOption, PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.reply import Completion
    from paceline.sampling import Sampling


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; without it, or as '-', stdin is read.", show_default=False)
    ] = None,
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    raw: Annotated[bool, typer.Option("--raw", help="Give text to the model as it is, without the chat template.")] = (
        False
    ),
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='Answer every row of a JSONL file (\'-\': stdin): {"id", "prompt" | "turns" | "messages"}; '
            "of turns, the first.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object per reply: id, token_ids, text, finish_reason, stats."),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="With --json: each token's log-probability before any sampling option, and the N likeliest tokens.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write the model's reply to PROMPT, as it comes.

    On a terminal, tokens that were drafted and accepted are green. Statistics go to stderr.
    """
    if prompt is not None and prompts is not None:
        raise InvalidOption("there is a prompt and a file of prompts", "Give only one of them")
    if logprobs is not None and not as_json:
        raise InvalidOption("--logprobs has nowhere to go in a text", "Give --json too")
    rows = [Row(None, single_prompt(prompt))] if prompts is None else read_rows(prompts)
    sampling.check(logprobs=logprobs)
    _keep_apart(prompts, output)
    with _destination(output) as file:
        llm = load.load(progress=progress_wanted(quiet))
        _clear(file, output)
        job = _Job(llm, sampling.of(llm, logprobs=logprobs), raw, as_json, file)
        if prompts is None:
            _one(job, rows[0], quiet)
        elif _many(job, rows, quiet):
            raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Job:
    llm: LLM
    sampling: Sampling
    raw: bool
    as_json: bool
    file: TextIO

    def write(self, row: Row) -> Completion:
        """One reply: its text as it comes, or a JSON line when it is whole."""
        if self.as_json:
            completion = self.llm.generate(row.prompt, self.sampling, raw=self.raw)
            name = {} if row.id is None else {"id": row.id}
            # ASCII: safe in any encoding, and no U+2028 splits a line for readers that count it as an end.
            self.file.write(json.dumps(name | completion.as_dict()) + "\n")
            self.file.flush()
            return completion
        if row.id is not None:
            self.file.write(f"==> {row.id} <==\n")
        display = Display(self.file)
        try:
            return self.llm.generate(row.prompt, self.sampling, raw=self.raw, on_chunk=display.write)
        finally:
            display.end()


def _one(job: _Job, row: Row, quiet: bool) -> None:
    completion = job.write(row)
    if not quiet:
        typer.echo(summary(completion.stats, sampled=job.sampling.temperature > 0), err=True)


def _many(job: _Job, rows: list[Row], quiet: bool) -> int:
    """Every row in turn; returns how many failed."""
    failed = 0
    progress = _Progress(len(rows), quiet)
    for row in rows:
        # The line stays while a JSON reply is computed; a text would be written over it.
        if not job.as_json:
            progress.hide()
        try:
            completion = job.write(row)
        except PacelineError as error:
            failed += 1
            progress.hide()
            complain(f"row {row.id}: {error}")
            progress.advance(0)
        else:
            progress.advance(completion.stats.tokens)
    progress.finish(failed)
    return failed


class _Progress:
    """One line on stderr: rewritten in place on a terminal, else repeated every few seconds."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._total, self._quiet, self._live = total, quiet, sys.stderr.isatty()
        self._done = self._tokens = 0
        self._began = self._last = time.perf_counter()

    def advance(self, tokens: int) -> None:
        self._done += 1
        self._tokens += tokens
        if self._quiet:
            return
        if self._live:
            typer.echo(f"\r\x1b[2K{self._line()}", nl=False, err=True)
        elif self._done < self._total and time.perf_counter() - self._last > 5:
            typer.echo(self._line(), err=True)
            self._last = time.perf_counter()

    def hide(self) -> None:
        if self._live and not self._quiet:
            typer.echo("\r\x1b[2K", nl=False, err=True)

    def finish(self, failed: int) -> None:
        self.hide()
        if not self._quiet:
            typer.echo(self._line() + (f" · {failed} failed" if failed else ""), err=True)

    def _line(self) -> str:
        seconds = time.perf_counter() - self._began
        return f"{self._done}/{self._total} prompts · {self._tokens} tokens · {self._tokens / seconds:.1f} tok/s"


def _keep_apart(prompts: Path | None, output: Path | None) -> None:
    if prompts is None or output is None or str(prompts) == STDIN or not output.exists():
        return
    if os.path.samefile(prompts, output):
        raise InvalidOption(f"--output {output} would overwrite the prompts", "Give it another name")


@contextlib.contextmanager
def _destination(output: Path | None) -> Iterator[TextIO]:
    """Open for appending: a model that fails to load must not cost the file's old content."""
    if output is None:
        yield sys.stdout
        return
    with output.open("a", encoding="utf-8", newline="") as file:
        yield file


def _clear(file: TextIO, output: Path | None) -> None:
    if output is not None:
        # Not everything that can be written to can be cut (a pipe, a terminal).
        with contextlib.suppress(OSError):
            file.truncate(0)
