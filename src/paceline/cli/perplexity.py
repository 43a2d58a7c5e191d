"""`paceline perplexity`: what quantised weights cost, on a text of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ModelOptions, Quiet, progress_wanted
from paceline.errors import InvalidPrompt

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.perplexity import TextWindow, TokenScores
    from paceline.llm import LLM

_MODES = ("int8", "int4")


def perplexity(
    file: Annotated[Path, typer.Argument(help="A text to predict, in UTF-8.")],
    *,
    model: ModelOptions,
    quantize: Annotated[
        list[str] | None,
        typer.Option("--quantize", help="int8 or int4; may be repeated. Without it, both."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Read so many tokens of the text at most.")] = 20_000,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that are read together.")] = 512,
    context: Annotated[
        int, typer.Option("--context", min=1, help="Of those, how many only precede what is predicted.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure what --quantize costs on a text: the perplexity, and how often the likeliest token stays the same."""
    from paceline.kernels.quantize import check_mode

    modes = [None, *dict.fromkeys(quantize or _MODES)]
    for mode in modes:
        check_mode(mode)
    text, shown = _text(file), progress_wanted(quiet)
    measured = [_measured(model, mode, text, tokens, (window, context), shown) for mode in modes]
    results = [_facts(name, scored, measured[0][1]) for name, scored in measured]
    if as_json:
        asked = {"model": model.model, "file": str(file), "window": window, "context": context}
        typer.echo(json.dumps(asked | {"results": results}))
        return
    from rich.console import Console

    Console().print(_table(results))


def _facts(name: str, scored: TokenScores, plain: TokenScores) -> dict[str, Any]:
    same = plain.agreement(scored)
    return {"weights": name, "perplexity": scored.perplexity, "same_top1": same, "tokens": len(scored.best)}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"{file} is not UTF-8 text (byte {error.start})", "Convert it to UTF-8") from None


def _measured(
    model: ModelOptions, mode: str | None, text: str, tokens: int, size: tuple[int, int], shown: bool
) -> tuple[str, TokenScores]:
    """What the weights are called, held so, and how the model then predicts the text. It is dropped again."""
    from rich.console import Console

    from paceline.bench.perplexity import score

    llm = model.open(progress=shown, drafter=None, quantize=mode)
    pieces = _windows(llm, text, tokens, size)
    with Console(stderr=True, quiet=not shown).status(f"reading {_name(llm, mode)}"):
        return _name(llm, mode), score(llm.model.target, pieces)


def _windows(llm: LLM, text: str, tokens: int, size: tuple[int, int]) -> list[TextWindow]:
    """A model that is used to a beginning-of-text token gets one in front of every window."""
    from paceline.bench.perplexity import windows

    plain = llm.tokenizer.encode(text, special=False)
    marked = llm.tokenizer.encode(text)
    front = marked[: len(marked) - len(plain)]
    length = min(size[0], llm.model.target.context_length - len(front))
    return windows(plain[:tokens], length, size[1], front)


def _name(llm: LLM, mode: str | None) -> str:
    from paceline.protocols import TargetWithHead

    target = llm.model.target
    return mode or (str(target.dtype).removeprefix("torch.") if isinstance(target, TargetWithHead) else "as it is")


def _table(results: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("weights", "perplexity", "change", "same likeliest token", "tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    first = results[0]["perplexity"]
    for row in results:
        change = "-" if row is results[0] else f"{100 * (row['perplexity'] / first - 1):+.2f} %"
        same = f"{100 * row['same_top1']:.1f} %"
        table.add_row(row["weights"], f"{row['perplexity']:.3f}", change, same, f"{row['tokens']:,}")
    return table
