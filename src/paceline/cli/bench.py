"""`paceline bench`: how fast is it here, on your prompts, beside other programs?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Quiet, parse_draft, progress_wanted
from paceline.errors import CannotWrite, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from paceline.bench.run import Order
    from paceline.types import Tree


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is compared, and on what."""

    drafters: Annotated[
        str, typer.Option("--drafters", help="Drafters, separated by commas; plain decoding is always measured.")
    ] = "auto"
    against: Annotated[
        str, typer.Option("--against", help="Other programs: transformers, llama.cpp, openvino (if installed).")
    ] = ""
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts, picked evenly over the categories.")] = 13
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens per reply, at most.")] = 96
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Times that every prompt is asked.")] = 1
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 0.0
    draft: Annotated[str, typer.Option("--draft", help="As for generate; auto leaves it to the controller.")] = "auto"
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of every system.")] = None

    def order(self) -> Order:
        """In the library's terms. Raises `InvalidOption`."""
        import torch

        from paceline.bench.run import Order
        from paceline.drafters.make import check_spec, to_tree

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        drafters = _names(self.drafters)
        for drafter in drafters:
            check_spec(drafter)
        draft: Tree | None = to_tree(parse_draft(self.draft))
        return Order(
            drafters,
            draft,
            _names(self.against),
            self.tokens,
            self.repeats,
            self.temperature,
            threads=torch.get_num_threads(),
        )


def bench(
    *,
    prompts: Annotated[
        Path, typer.Option("--prompts", help='JSONL of {"category", "prompt"}, or of Spec-Bench questions.')
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="As for generate.")] = "demo",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    options: BenchOptions,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write everything there as JSON.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page with plots there (HTML).")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure drafters, and other programs, side by side on your prompts: interleaved, text to text."""
    order = options.order()
    for path in (out, report):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidOption(f"{path.absolute().parent} is no folder", "Name a file in a folder that is there")
    from rich.console import Console
    from rich.progress import Progress

    from paceline.bench.page import page
    from paceline.bench.questions import pick, read_questions
    from paceline.bench.run import run
    from paceline.llm import load

    questions = pick(read_questions(prompts), options.count)
    llm = load(model, drafter=None, dtype=dtype, device=device, progress=progress_wanted(quiet))  # type: ignore[arg-type]
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("warming up", total=None)
        result = run(
            llm, order, questions, lambda s, n: bar.update(task, total=n, advance=1, description=s.question.category)
        )
    Console(width=None if progress_wanted(False) else 140).print(_table(result))
    for line in result["missing"]:
        typer.echo(f"not measured: {line}", err=True)
    if out is not None:
        _write(out, json.dumps(result, indent=1) + "\n")
    if report is not None:
        _write(report, page(result))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} could not be written ({error})", "Give another place") from error


def _table(result: Mapping[str, Any]) -> Table:
    from rich.table import Table

    base = result["systems"][0]["system"]
    table = Table(title="Text to text, batch 1", title_justify="left", title_style="bold")
    columns = ("system", "tok/s", "decode tok/s", "first token", f"x {base} [95 %]", "tokens/round", "worst category")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for s in result["systems"]:
        ratio, inside, categories = s["ratio"], s["inside"], s["categories"]
        worst = min(categories, key=lambda c: categories[c]["ratio"])
        table.add_row(
            s["system"],
            f"{s['tokens_per_second']:.1f}",
            f"{s['decode_tokens_per_second']:.1f}",
            f"{1e3 * s['first_token_seconds']:.0f} ms",
            f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            f"{inside['tokens_per_round']:.2f}" if inside else "",
            f"{worst} {categories[worst]['ratio']:.2f}",
        )
    return table
