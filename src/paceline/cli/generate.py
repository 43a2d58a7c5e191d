"""`paceline generate`: one prompt, or a file of prompts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from paceline.cli.commands import options_of
from paceline.cli.images import read_images
from paceline.cli.options import DEMO, LoadFlags, Quiet, SamplingOptions, follows, note, progress_wanted
from paceline.cli.prompts import STDIN, read_rows, single_prompt
from paceline.cli.record import recording
from paceline.cli.show import summary
from paceline.cli.wrapping import say
from paceline.cli.writing import ReplyWriter, write_batch, write_one_by_one
from paceline.errors import InvalidOption, ModelNotFound
from paceline.text.image_part import with_images
from paceline.text.prompt_rows import PromptRow

if TYPE_CHECKING:
    from paceline.llm import LLM

_io = options_of("Input and output")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Prompts, number of replies, and output."""

    raw: bool = _io("Pass the text to the model unchanged, without the chat template.", default=False)
    prompts: Path | None = _io(
        'JSONL file of prompts, one {"prompt": ...} per line; - is stdin.\n\nA row has an optional "id" and one of '
        '"prompt", "turns" (only the first is used) and "messages".',
        metavar="FILE",
    )
    image: list[str] | None = _io(
        "Image for the model to look at; - is stdin. Repeatable.\n\nPNG, JPEG, WebP, GIF or BMP. The images come "
        "before the prompt, in this order.",
        metavar="FILE",
    )
    as_json: bool = _io(
        "Print each reply as one line of JSON.\n\nIts keys are token_ids, text, finish_reason and stats, and also id "
        "or sample if there are several replies.",
        "--json",
        default=False,
    )
    logprobs: int | None = _io(
        "With --json: log-probabilities of each token and of the N most likely ones, before sampling options apply."
    )
    samples: int = _io("Number of replies per prompt; they share its prefill.", metavar="N", min=1, default=1)
    batch: int = _io("Number of --prompts to answer at once. It does not affect the replies.", min=1, default=1)
    record: Path | None = _io("Append the replies to this recording, for replay and tune.", metavar="FILE")
    output: Path | None = _io("Write to this file instead of stdout.", "-o", metavar="FILE")


def generate(
    ctx: typer.Context,
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Model; the same as --model. A single argument is the prompt.", show_default=False
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompt to answer. Piped text is added (</dev/null prevents this); - or no prompt: stdin.",
            show_default=False,
        ),
    ] = None,
    *,
    load: LoadFlags,
    sampling: SamplingOptions,
    out: OutputOptions,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt, or a file of prompts.

    The reply appears as it is written. On a terminal, drafted tokens that the model accepted are green. Statistics are
    printed on stderr.
    """
    model, prompt = _model_and_prompt(first, second, ctx.args, load.model)
    load = load.with_model(model)
    if prompt is not None and out.prompts is not None:
        raise InvalidOption("both a prompt and --prompts were given", "Give only one of them")
    if out.logprobs is not None and not out.as_json:
        raise InvalidOption("--logprobs needs JSON output", "Add --json")
    sampling.check(logprobs=out.logprobs)
    if out.image and (out.raw or out.prompts is not None):
        raise InvalidOption(
            f"--image does not work with {'--raw' if out.raw else '--prompts'}", "Leave out one of them"
        )
    rows: list[PromptRow] = []
    if not follows():
        if out.prompts is None:
            rows = [_row(prompt, out.image)]
        else:
            rows = read_rows(out.prompts)
    with _destination(out.output, out.prompts) as file:
        llm = _load(load, model, out, quiet)
        if out.image:
            llm.required_vision()
        if out.output is not None:
            # Pipes and terminals can be written to, but not truncated.
            with contextlib.suppress(OSError):
                file.truncate(0)
        writer = ReplyWriter(
            llm, sampling.resolve(llm, logprobs=out.logprobs), out.raw, out.as_json, file, progress_wanted(quiet)
        )
        with recording(llm, out.record):
            failed = _write(writer, rows, out, quiet)
        if failed:
            raise typer.Exit(1)


def _row(prompt: str | None, images: list[str] | None) -> PromptRow:
    """Return the prompt of the command line with its images."""
    if images and STDIN in images and prompt in (None, STDIN):
        raise InvalidOption("--image - reads stdin, so the prompt must come from elsewhere", "Pass it as an argument")
    text = single_prompt(prompt, with_stdin=STDIN not in (images or ()))
    if not images:
        return PromptRow(None, text)
    return PromptRow(None, [{"role": "user", "content": with_images(text, read_images(images))}])


def _write(writer: ReplyWriter, rows: list[PromptRow], out: OutputOptions, quiet: bool) -> int:
    """Answer the rows. Return the number of failures."""
    if out.samples > 1 or (out.batch > 1 and out.prompts is not None):
        return write_batch(writer, rows, out.samples, max(out.batch, out.samples), quiet)
    if out.prompts is not None:
        return write_one_by_one(writer, rows, quiet)
    completion = writer.write(rows[0])
    if not quiet:
        say(summary(completion, writer.sampling))
    return 0


def _model_and_prompt(
    first: str | None, second: str | None, more: list[str], option_value: str
) -> tuple[str | None, str | None]:
    """Tell model and prompt apart.

    Args:
        first: First argument.
        second: Second argument.
        more: Further arguments, which are an error.
        option_value: Value of --model.

    Returns:
        Model and prompt.

    Raises:
        InvalidOption: If the prompt is missing or not quoted.
    """
    if more:
        raise InvalidOption(f"the prompt has several arguments ({second} {' '.join(more)})", "Quote the prompt")
    if second is not None:
        return first, second
    if first and option_value == DEMO and (os.path.isdir(first) or (first.endswith(".gguf") and os.path.isfile(first))):
        raise InvalidOption(
            f"{first} is a model, and the prompt is missing",
            f'Write `paceline generate {first} "PROMPT"`, or -m {first} if the prompts come from stdin or a file',
        )
    return None, first


def _load(load: LoadFlags, model: str | None, out: OutputOptions, quiet: bool) -> LLM:
    """Load the model. `model` is the MODEL argument, which may be the first word of a prompt without quotes."""
    prefixes: dict[str, Any] = {} if out.prompts else {"prefix_memory": 0}  # a single prompt has no earlier texts
    try:
        llm = load.load(progress=progress_wanted(quiet), **prefixes)
    except ModelNotFound as error:
        if model is None or "/" in model:
            raise
        raise ModelNotFound(
            error.cause, f"{error.fix}. If {model!r} is part of the prompt, quote the prompt"
        ) from error
    if llm.tokenizer.chat_template is None and not out.raw:
        note("no chat template: the model continues your text")
    return llm


@contextlib.contextmanager
def _destination(output: Path | None, prompts: Path | None) -> Iterator[TextIO]:
    """Open the output for appending: a model that fails to load must not erase the file."""
    if output is None:
        yield sys.stdout
        return
    if prompts is not None and str(prompts) != STDIN and output.exists() and os.path.samefile(prompts, output):
        raise InvalidOption(f"--output {output} would overwrite the prompts", "Give it another name")
    with output.open("a", encoding="utf-8", newline="") as file:
        yield file
