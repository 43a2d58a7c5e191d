"""Writing replies to many prompts, one after the other or in a batch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import typer

from paceline.cli.commands import print_error
from paceline.cli.show import Display, length_limit, stream_reply
from paceline.cli.wrapping import say
from paceline.errors import InvalidPrompt, PacelineError
from paceline.text.prompt_rows import PromptRow

if TYPE_CHECKING:
    from paceline.engine.results import Completion
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling


@dataclass(frozen=True, slots=True)
class ReplyWriter:
    """Generates replies and writes them to a file, as text or as lines of JSON.

    `progress`: Show the progress of long prompts on stderr.
    """

    llm: LLM
    sampling: Sampling
    raw: bool
    as_json: bool
    file: TextIO
    progress: bool = False

    def write(self, row: PromptRow) -> Completion:
        """Generate and write a reply: text while it is generated, JSON when it is complete."""
        if self.as_json:
            completion = self.llm.generate(row.prompt, self.sampling, raw=self.raw)
            self.write_completion(row, completion)
            return completion
        if row.id is not None:
            self.file.write(f"==> {row.id} <==\n")
        return stream_reply(self.llm, row.prompt, self.sampling, self.file, self.raw, self.progress)

    def write_completion(self, row: PromptRow, completion: Completion, sample: int | None = None) -> None:
        """Write a complete reply with the id of its prompt and, if there are several replies, its number."""
        name = {} if row.id is None else {"id": row.id}
        if sample is not None:
            name["sample"] = sample
        if self.as_json:
            # ASCII is safe in any encoding, and avoids U+2028, which some readers treat as the end of a line.
            self.file.write(json.dumps(name | completion.as_dict()) + "\n")
            self.file.flush()
            return
        title = " ".join(f"sample {value}" if key == "sample" else str(value) for key, value in name.items())
        self.file.write(f"==> {title} <==\n")
        display = Display(self.file)
        display.text(completion.text)
        display.end()


def write_one_by_one(writer: ReplyWriter, rows: list[PromptRow], quiet: bool) -> int:
    """Answer the rows one after the other. Return the number of failures."""
    failed = 0
    progress = _ProgressLine(len(rows), quiet)
    for row in rows:
        # The line stays while a JSON reply is computed, but must be hidden before text is written.
        if not writer.as_json:
            progress.hide()
        try:
            completion = writer.write(row)
        except PacelineError as error:
            failed += 1
            progress.hide()
            print_error(f"row {row.id}: {error}")
            progress.advance(0)
        else:
            progress.count(completion, writer.sampling)
    progress.finish(failed)
    return failed


def write_batch(writer: ReplyWriter, rows: list[PromptRow], samples: int, width: int, quiet: bool) -> int:
    """Answer the rows in a batch of `width`, and write the replies in the order of the rows.

    Returns:
        Number of rows that failed.
    """
    progress = _ProgressLine(len(rows) * samples, quiet, "prompts" if samples == 1 else "replies")
    prompts = [(row, ids) for row in rows if (ids := _prompt_ids(writer, row))]
    failed = len(rows) - len(prompts)
    progress.advance(0, failed * samples)
    batch = writer.llm.batch([ids for _, ids in prompts], writer.sampling, n=samples, width=width)
    finished: set[int] = set()
    num_written = 0

    def write_finished() -> None:
        """Write finished replies, up to the first unfinished one."""
        nonlocal num_written
        while num_written in finished:
            row, sample = divmod(num_written, samples)
            if num_written not in batch.errors:
                progress.hide()
                completion = batch.completion(num_written)
                writer.write_completion(prompts[row][0], completion, sample if samples > 1 else None)
            num_written += 1

    try:
        for index, chunk in batch:
            if chunk.finish_reason:
                finished.add(index)
                progress.count(batch.completion(index), writer.sampling)
                write_finished()
    except PacelineError as error:
        if error not in batch.errors.values():
            raise
    finally:
        batch.close()
        for index, failure in batch.errors.items():
            print_error(f"row {prompts[index // samples][0].id}: {failure}")
            progress.advance(0)
        finished.update(batch.errors)
        write_finished()
    failed += len({index // samples for index in batch.errors})
    progress.finish(failed)
    return failed


def _prompt_ids(writer: ReplyWriter, row: PromptRow) -> list[int] | None:
    """Return the token ids of a row. If it cannot be answered, print an error on stderr and return None."""
    try:
        return writer.llm.prompt_ids(row.prompt, raw=writer.raw)
    except InvalidPrompt as error:
        print_error(f"row {row.id}: {error}")
        return None


class _ProgressLine:
    """Line on stderr: rewritten in place on a terminal, else repeated every few seconds."""

    def __init__(self, total: int, quiet: bool, unit: str = "prompts") -> None:
        self._total, self._quiet, self._live, self._unit = total, quiet, sys.stderr.isatty(), unit
        self._done = self._tokens = self._cut = 0
        self._began = self._printed = time.perf_counter()

    def count(self, reply: Completion, sampling: Sampling) -> None:
        """Count a reply."""
        self._cut += bool(length_limit(reply, sampling))
        self.advance(reply.stats.tokens)

    def advance(self, tokens: int, replies: int = 1) -> None:
        self._done += replies
        self._tokens += tokens
        if self._quiet:
            return
        if self._live:
            typer.echo(f"\r\x1b[2K{self._line()}", nl=False, err=True)
        elif self._done < self._total and time.perf_counter() - self._printed > 5:
            typer.echo(self._line(), err=True)
            self._printed = time.perf_counter()

    def hide(self) -> None:
        if self._live and not self._quiet:
            typer.echo("\r\x1b[2K", nl=False, err=True)

    def finish(self, failed: int) -> None:
        self.hide()
        if not self._quiet:
            cut = f" · {self._cut} cut at the token limit; raise -n" if self._cut else ""
            say(self._line() + cut + (f" · {failed} failed" if failed else ""))

    def _line(self) -> str:
        seconds = time.perf_counter() - self._began
        return f"{self._done}/{self._total} {self._unit} · {self._tokens} tokens · {self._tokens / seconds:.1f} tok/s"
