"""`paceline bench`: speed on this machine, on your prompts, beside other programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.commands import option
from paceline.cli.options import DEMO, DataType, Device, ModelName, Quiet, Threads, progress_wanted, set_threads
from paceline.errors import CannotWrite, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.systems import Comparison
    from paceline.llm import LLM


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Model to measure, at one or more precisions."""

    model: ModelName = DEMO
    dtype: DataType = "auto"
    device: Device = "auto"
    quantize: Annotated[
        str,
        option(
            "Precisions to measure, separated by commas: none, int8, int4.\n\nWith +int8 or +int4 after it the "
            "drafters are quantised too, such as int4+int8.",
            metavar="MODES",
        ),
    ] = "none"

    def precisions(self) -> list[str]:
        """Return each precision once, "" for none. Raises `InvalidOption`."""
        from paceline.bench.systems import split_precision

        found = ["" if name == "none" else name for name in _names(self.quantize)] or [""]
        for name in found:
            split_precision(name)
        return list(dict.fromkeys(found))

    def load(self, *, progress: bool) -> dict[str, LLM]:
        """Load the model at each precision; precisions with the same weights share them. Raises `PacelineError`."""
        import paceline.llm
        from paceline.bench.systems import split_precision

        modes = {name: split_precision(name)[0] for name in self.precisions()}
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "progress": progress}
        loaded = {
            mode: paceline.llm.load(self.model, drafter=None, quantize=mode, **where) for mode in set(modes.values())
        }
        return {name: loaded[mode] for name, mode in modes.items()}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Systems to compare, and conditions."""

    drafters: Annotated[
        str,
        option(
            "Drafters, separated by commas. Plain decoding is always measured.\n\nA drafter gets its own draft size "
            "with @LENGTH or @NODESxDEPTHxBRANCH after it, such as eagle3@24x6x4.",
            metavar="DRAFTERS",
        ),
    ] = "suffix"
    against: Annotated[
        str, option("Other programs, if installed: transformers, llama.cpp, openvino.", metavar="PROGRAMS")
    ] = ""
    tokens: Annotated[int, option("Maximum length of a reply, in tokens.", min=1)] = 96
    repeats: Annotated[int, option("Measurements of every prompt.", min=1)] = 1
    temperature: Annotated[str, option("Temperatures, separated by commas; 0 is greedy.", metavar="X,X")] = "0"
    rule: Annotated[
        str, option("Acceptance rule above temperature 0: match, rejection, block or typical.", metavar="RULE")
    ] = "match"
    seed: Annotated[int, option("Seed of sampled replies.")] = 0
    threads: Threads = None

    def comparison(self) -> Comparison:
        """Return what to compare. Raises `InvalidOption`."""
        import torch

        from paceline.bench.systems import Comparison

        set_threads(self.threads)
        return Comparison(
            _names(self.drafters),
            _names(self.against),
            _temperatures(self.temperature),
            self.rule,  # type: ignore[arg-type]  # Sampling checks it
            self.tokens,
            self.repeats,
            self.seed,
            torch.get_num_threads(),
        )


def bench(
    *,
    prompts: Annotated[
        Path,
        option('JSONL file of {"category", "prompt"}, or of Spec-Bench questions.', metavar="FILE"),
    ],
    target: TargetOptions,
    options: BenchOptions,
    count: Annotated[int, option("Prompts to measure, spread evenly over the categories.", min=1)] = 13,
    context: Annotated[
        int | None, option("Lengthen every prompt to N tokens with the text of others before it.", min=1)
    ] = None,
    out: Annotated[Path | None, option("Write all results to this file, as JSON.", "-o", metavar="FILE")] = None,
    report: Annotated[
        list[Path] | None, option("Write tables (.md) or a page with plots (.html). Repeatable.", metavar="FILE")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare drafters, and other programs, on your prompts.

    The systems take turns on every prompt and are timed from text to text.
    """
    comparison = options.comparison()
    target.precisions()
    _check_outputs(out, report or [])
    from rich.console import Console
    from rich.progress import Progress

    from paceline.bench.questions import lengthen, pick, read_questions
    from paceline.bench.run import run

    everything = read_questions(prompts)
    targets = target.load(progress=progress_wanted(quiet))
    questions = pick(everything, count)
    if context is not None:
        tokenizer = next(iter(targets.values())).tokenizer
        questions = [lengthen(question, everything, context, tokenizer) for question in questions]
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("getting ready", total=None)

        def advance(sample: Any, total: int) -> None:
            bar.update(task, total=total, advance=1, description=sample.question.category)

        result = run(targets, comparison, questions, advance, prompts=str(prompts), context=context)
    _show(result)
    if out is not None:
        _write(out, json.dumps(result, indent=1) + "\n")
    for path in report or []:
        _write(path, _report(path, result))


def _check_outputs(out: Path | None, reports: Sequence[Path]) -> None:
    """Raises `InvalidOption` before hours are spent on results that cannot be written."""
    for path in [*([out] if out else []), *reports]:
        if not path.absolute().parent.is_dir():
            raise InvalidOption(f"{path.absolute().parent} is not a folder", "Name a file in an existing folder")
    for path in reports:
        if path.suffix not in (".md", ".html"):
            raise InvalidOption(f"--report must end in .md or .html, got {path}", "Name such a file")


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console

    from paceline.bench.tables import main_grids

    console = Console(width=None if Console().is_terminal else 160)
    for grid in main_grids(result):
        console.print(grid.rich())
    for line in result["findings"]:
        console.print(line, markup=False, highlight=False)
    for line in result["missing"]:
        typer.echo(f"not measured: {line}", err=True)


def _report(path: Path, result: Mapping[str, Any]) -> str:
    from paceline.bench.page import page
    from paceline.bench.tables import all_grids, markdown

    if path.suffix == ".html":
        return page(result)
    lines = [*result["findings"], *(f"not measured: {line}" for line in result["missing"])]
    return markdown(path.stem, result["provenance"], all_grids(result), lines)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(map(float, _names(text)))) or (0.0,)
    except ValueError:
        raise InvalidOption(f"--temperature must be numbers, got {text!r}", "Write, for example, 0,0.7") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} could not be written ({error})", "Name another file") from error
