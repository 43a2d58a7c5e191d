"""Writing many replies: one after the other, or together."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from paceline.cli.errors import complain
from paceline.cli.show import Display, cut_at
from paceline.errors import InvalidPrompt, PacelineError
from paceline.text.prompt_rows import PromptRow

if TYPE_CHECKING:
    from paceline.engine.results import Completion
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How replies are made and written."""

    llm: LLM
    sampling: Sampling
    raw: bool
    as_json: bool
    file: TextIO

    def write(self, row: PromptRow) -> Completion:
        """One reply: its text as it comes, or a JSON line when it is whole."""
        if self.as_json:
            completion = self.llm.generate(row.prompt, self.sampling, raw=self.raw)
            self.line({} if row.id is None else {"id": row.id}, completion)
            return completion
        if row.id is not None:
            self.file.write(f"==> {row.id} <==\n")
        display = Display(self.file)
        try:
            return self.llm.generate(row.prompt, self.sampling, raw=self.raw, on_chunk=display.write)
        finally:
            display.end()

    def whole(self, row: PromptRow, sample: int | None, completion: Completion) -> None:
        """A finished reply, under its prompt's id and, where there are several, its number."""
        number = {} if sample is None else {"sample": sample}
        if self.as_json:
            return self.line(({} if row.id is None else {"id": row.id}) | number, completion)
        name = " ".join(str(part) for part in (row.id, *(f"sample {n}" for n in number.values())) if part is not None)
        self.file.write(f"==> {name} <==\n")
        display = Display(self.file)
        display.text(completion.text)
        display.end()
        return None

    def line(self, name: dict[str, Any], completion: Completion) -> None:
        # ASCII: safe in any encoding, and no U+2028 splits a line for readers that count it as an end.
        self.file.write(json.dumps(name | completion.as_dict()) + "\n")
        self.file.flush()


def write_one_by_one(job: WritingOptions, rows: list[PromptRow], quiet: bool) -> int:
    """Every row in turn; returns how many failed."""
    failed = 0
    progress = _ProgressLine(len(rows), quiet)
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
            progress.count(completion, job.sampling)
    progress.finish(failed)
    return failed


def write_together(job: WritingOptions, rows: list[PromptRow], samples: int, width: int, quiet: bool) -> int:
    """All rows in one batch, written in their order; returns how many prompts failed."""
    progress = _ProgressLine(len(rows) * samples, quiet, "prompts" if samples == 1 else "replies")
    prompts = [(row, _prompt_ids(job, row)) for row in rows]
    sound = [row for row, ids in prompts if ids]
    failed = len(rows) - len(sound)
    progress.advance(0, failed * samples)
    batch = job.llm.batch([ids for _, ids in prompts if ids], job.sampling, n=samples, width=width)
    written = 0

    def write(ended: set[int]) -> None:
        """What has ended, as far as nothing before it is missing."""
        nonlocal written
        while written in ended:
            row, sample = divmod(written, samples)
            if written not in batch.errors:
                progress.hide()
                job.whole(sound[row], sample if samples > 1 else None, batch.completion(written))
            written += 1

    ended: set[int] = set()
    try:
        for index, chunk in batch:
            if chunk.finish_reason:
                ended.add(index)
                progress.count(batch.completion(index), job.sampling)
                write(ended)
    except PacelineError as error:
        if error not in batch.errors.values():
            raise
    finally:
        batch.close()
        for index, failure in batch.errors.items():
            complain(f"row {sound[index // samples].id}: {failure}")
            progress.advance(0)
        write(ended | set(batch.errors))
    failed += len({index // samples for index in batch.errors})
    progress.finish(failed)
    return failed


def _prompt_ids(job: WritingOptions, row: PromptRow) -> list[int] | None:
    """The row's token ids; None, said on stderr, where it cannot be answered."""
    try:
        return job.llm.prompt_ids(row.prompt, raw=job.raw)
    except InvalidPrompt as error:
        complain(f"row {row.id}: {error}")
        return None


class _ProgressLine:
    """One line on stderr: rewritten in place on a terminal, else repeated every few seconds."""

    def __init__(self, total: int, quiet: bool, what: str = "prompts") -> None:
        self._total, self._quiet, self._live, self._what = total, quiet, sys.stderr.isatty(), what
        self._done = self._tokens = self._cut = 0
        self._began = self._last = time.perf_counter()

    def count(self, reply: Completion, sampling: Sampling) -> None:
        """One reply more."""
        self._cut += bool(cut_at(reply, sampling))
        self.advance(reply.stats.tokens)

    def advance(self, tokens: int, replies: int = 1) -> None:
        self._done += replies
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
            cut = f" · {self._cut} cut at the token limit; raise -n" if self._cut else ""
            typer.echo(self._line() + cut + (f" · {failed} failed" if failed else ""), err=True)

    def _line(self) -> str:
        seconds = time.perf_counter() - self._began
        return f"{self._done}/{self._total} {self._what} · {self._tokens} tokens · {self._tokens / seconds:.1f} tok/s"
