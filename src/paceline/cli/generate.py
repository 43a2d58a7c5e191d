"""`paceline generate`: one prompt, or a file of them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from paceline.cli.options import DEMO, LoadOptions, Quiet, SamplingOptions, note, progress_wanted
from paceline.cli.prompts import STDIN, read_rows, single_prompt
from paceline.cli.show import summary
from paceline.cli.writing import WritingOptions, write_one_by_one, write_together
from paceline.errors import InvalidOption, ModelNotFound
from paceline.text.prompt_rows import PromptRow

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How many replies, how many at once, and where they go."""

    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object per reply: id, token_ids, text, finish_reason, stats."),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="With --json: each token's log-probability before any sampling option, and the N likeliest tokens.",
        ),
    ] = None
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Replies per prompt, which share its prefill.")
    ] = 1
    width: Annotated[
        int,
        typer.Option(
            "--batch",
            metavar="N",
            min=1,
            help="Answer this many prompts of --prompts at once; each reply is the one that its prompt gets alone.",
        ),
    ] = 1
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None


def generate(
    ctx: typer.Context,
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The model; same as --model. A single argument is the prompt.", show_default=False
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="What to answer. Text on stdin is added to it (in a shell loop, keep it out with </dev/null); without "
            "a prompt, or with '-', stdin is the prompt.",
            show_default=False,
        ),
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
    out: OutputOptions,
    quiet: Quiet = False,
) -> None:
    """Write the model's reply to PROMPT, as it comes.

    On a terminal, tokens that were drafted and accepted are green. Statistics go to stderr.
    """
    model, prompt = _model_and_prompt(first, second, ctx.args, load.model)
    load = load.named(model)
    if prompt is not None and prompts is not None:
        raise InvalidOption("there is a prompt and a file of prompts", "Give only one of them")
    if out.logprobs is not None and not out.as_json:
        raise InvalidOption("--logprobs has nowhere to go in a text", "Give --json too")
    sampling.check(logprobs=out.logprobs)
    rows = [PromptRow(None, single_prompt(prompt, with_stdin=True))] if prompts is None else read_rows(prompts)
    _keep_apart(prompts, out.output)
    with _destination(out.output) as file:
        llm = _load(load, model, raw, quiet)
        _clear(file, out.output)
        job = WritingOptions(llm, sampling.of(llm, logprobs=out.logprobs), raw, out.as_json, file)
        if out.samples > 1 or (out.width > 1 and prompts is not None):
            failed = write_together(job, rows, out.samples, max(out.width, out.samples), quiet)
        elif prompts is None:
            _one(job, rows[0], quiet)
            return
        else:
            failed = write_one_by_one(job, rows, quiet)
        if failed:
            raise typer.Exit(1)


def _model_and_prompt(
    first: str | None, second: str | None, more: list[str], option: str
) -> tuple[str | None, str | None]:
    """Return (model, prompt). `more`: arguments after the second. `option`: --model. Raises `InvalidOption`."""
    if more:
        raise InvalidOption(f"the prompt has several arguments ({second} {' '.join(more)})", "Quote the prompt")
    if second is not None:
        return first, second
    if first and option == DEMO and _names_model(first):
        raise InvalidOption(
            f"{first} is a path, and the prompt is missing",
            f'Write `paceline generate {first} "PROMPT"`, or -m {first} if the prompts come from stdin or a file',
        )
    return None, first


def _names_model(word: str) -> bool:
    return os.path.isdir(word) or (word.endswith(".gguf") and os.path.isfile(word))


def _load(load: LoadOptions, model: str | None, raw: bool, quiet: bool) -> LLM:
    """The model. `model`: the argument, which may be the first of two words of a prompt without quotes."""
    try:
        llm = load.load(progress=progress_wanted(quiet))
    except ModelNotFound as error:
        if model is None or "/" in model:
            raise
        raise ModelNotFound(error.cause, f"{error.fix}. If {model!r} begins the prompt, quote the prompt") from error
    if llm.tokenizer.chat_template is None and not raw:
        note("no chat template: the model continues your text")
    return llm


def _one(job: WritingOptions, row: PromptRow, quiet: bool) -> None:
    completion = job.write(row)
    if not quiet:
        typer.echo(summary(completion, job.sampling), err=True)


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
