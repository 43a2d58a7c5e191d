"""`paceline bench`: how fast is it here, on your prompts, beside other programs?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Quiet, progress_wanted, set_threads
from paceline.errors import CannotWrite, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.questions import Question
    from paceline.bench.systems import Comparison
    from paceline.llm import LLM


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The model that writes."""

    model: Annotated[str, typer.Option("--model", "-m", help="As for generate.")] = "demo"
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto"
    quantize: Annotated[
        str,
        typer.Option(
            "--quantize",
            help="Precisions to measure, separated by commas: none, int8 or int4 as for generate; with +int8 or +int4 "
            "after it the drafters are quantised too, such as int4+int8.",
        ),
    ] = "none"

    def precisions(self) -> list[str]:
        """Each once, "" for none. Raises `InvalidOption`."""
        from paceline.bench.systems import split_precision

        found = ["" if name == "none" else name for name in _names(self.quantize)] or [""]
        for name in found:
            split_precision(name)
        return list(dict.fromkeys(found))

    def load(self, *, progress: bool) -> dict[str, LLM]:
        """The model at each precision; weights that are held alike are held once. Raises `PacelineError`."""
        import paceline.llm
        from paceline.bench.systems import split_precision

        modes = {name: split_precision(name)[0] for name in self.precisions()}
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "progress": progress}
        held = {
            mode: paceline.llm.load(self.model, drafter=None, quantize=mode, **where) for mode in set(modes.values())
        }
        return {name: held[mode] for name, mode in modes.items()}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is compared."""

    drafters: Annotated[
        str,
        typer.Option(
            "--drafters",
            help="Drafters, separated by commas, each with a draft size of its own if it ends in @LENGTH or "
            "@NODESxDEPTHxBRANCH, such as eagle3@24x6x4. Plain decoding is always measured.",
        ),
    ] = "suffix"
    against: Annotated[
        str, typer.Option("--against", help="Other programs: transformers, llama.cpp, openvino (if installed).")
    ] = ""
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens per reply, at most.")] = 96
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Times that every prompt is asked.")] = 1
    temperature: Annotated[
        str, typer.Option("--temperature", help="Temperatures to measure, separated by commas; 0 is greedy.")
    ] = "0"
    rule: Annotated[str, typer.Option("--rule", help="match, rejection, block or typical, where T is above 0.")] = (
        "match"
    )
    seed: Annotated[int, typer.Option("--seed", help="Of what is sampled.")] = 0
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of every system.")] = None
    batch: Annotated[
        str,
        typer.Option(
            "--batch",
            help="Batch widths to measure, separated by commas, such as 1,8: how many requests are answered together.",
        ),
    ] = "1"

    def comparison(self) -> Comparison:
        """Return the options in the library's terms. Raises `InvalidOption`."""
        import torch

        from paceline.bench.systems import Comparison

        set_threads(self.threads)
        return Comparison(
            _names(self.drafters),
            _names(self.against),
            _temperatures(self.temperature),
            self.rule,  # type: ignore[arg-type]  # Sampling refuses what is no rule
            self.tokens,
            self.repeats,
            self.seed,
            torch.get_num_threads(),
            _widths(self.batch),
        )


def bench(
    *,
    prompts: Annotated[
        Path, typer.Option("--prompts", help='JSONL of {"category", "prompt"}, or of Spec-Bench questions.')
    ],
    target: TargetOptions,
    options: BenchOptions,
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts, picked evenly over the categories.")] = 13,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of a prompt: others' text stands before it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write everything there as JSON.")] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", help="Write tables there (.md), or a page with plots (.html). May be repeated."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure drafters, and other programs, side by side on your prompts: interleaved, text to text."""
    comparison = options.comparison()
    target.precisions()
    _check_places(out, report or [])
    from paceline.bench.questions import pick, read_questions

    everything = read_questions(prompts)
    targets = target.load(progress=progress_wanted(quiet))
    questions = pick(everything, count)
    if context is not None:
        questions = _lengthened(questions, everything, context, next(iter(targets.values())))
    result = _run(targets, comparison, questions, quiet, prompts=str(prompts), context=context)
    _show(result)
    if out is not None:
        _write(out, json.dumps(result, indent=1) + "\n")
    for path in report or []:
        _write(path, _report(path, result))


def _run(
    targets: Mapping[str, LLM], comparison: Comparison, questions: Sequence[Question], quiet: bool, **settings: Any
) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from paceline.bench.run import run

    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("getting ready", total=None)
        return run(
            targets,
            comparison,
            questions,
            lambda sample, total: bar.update(task, total=total, advance=1, description=sample.question.category),
            **settings,
        )


def _lengthened(questions: Sequence[Question], others: Sequence[Question], context: int, llm: LLM) -> list[Question]:
    from paceline.bench.questions import lengthen

    return [lengthen(question, others, context, llm.tokenizer) for question in questions]


def _check_places(out: Path | None, reports: Sequence[Path]) -> None:
    """Raises `InvalidOption` before an hour is spent on what cannot be written."""
    from paceline.bench.plots import require_matplotlib

    for path in [*([out] if out else []), *reports]:
        if not path.absolute().parent.is_dir():
            raise InvalidOption(f"{path.absolute().parent} is no folder", "Name a file in a folder that is there")
    for path in reports:
        if path.suffix not in (".md", ".html"):
            raise InvalidOption(f"--report {path} is of no known kind", "Name a file that ends in .md or .html")
        if path.suffix == ".html":
            require_matplotlib()


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
        raise InvalidOption(f"--temperature {text!r} is not possible", "Give numbers such as 0,0.7") from None


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(map(int, _names(text)))) or (1,)
    except ValueError:
        raise InvalidOption(f"--batch must be whole numbers, got {text!r}", "Give numbers such as 1,8") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} could not be written ({error})", "Give another place") from error
