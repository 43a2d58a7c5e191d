"""`paceline perplexity`: the cost of quantised weights, measured on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.commands import option
from paceline.cli.options import AsJson, ModelOptions, Quiet, progress_wanted
from paceline.cli.show import print_figures
from paceline.errors import InvalidPrompt

if TYPE_CHECKING:
    from paceline.bench.perplexity import TokenScores


def perplexity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text to predict, in UTF-8.")],
    *,
    model: ModelOptions,
    quantize: Annotated[
        list[str] | None, option("int8 or int4. Repeatable.", metavar="MODE", show_default="both")
    ] = None,
    tokens: Annotated[int, option("Read at most N tokens of the text.", min=2)] = 20_000,
    window: Annotated[int, option("Size of a window, in tokens.", min=2)] = 512,
    context: Annotated[int, option("Tokens at the start of each window that are context only.", min=1)] = 64,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure the loss of quality from --quantize on a text.

    The table shows the perplexity, and how often the most likely token stays the same.
    """
    from paceline.kernels.quantize import check_precision

    modes = ["none", *dict.fromkeys(quantize or ("int8", "int4"))]
    for mode in modes:
        check_precision(mode)
    text, progress = _text(file), progress_wanted(quiet)
    measured = [_measure(model, mode, text, tokens, (window, context), progress) for mode in modes]
    plain = measured[0][1]
    results: list[dict[str, Any]] = [
        {
            "weights": name,
            "perplexity": scores.perplexity,
            "same_top1": plain.agreement(scores),
            "tokens": len(scores.best),
        }
        for name, scores in measured
    ]
    if as_json:
        settings = {"model": model.model, "file": str(file), "window": window, "context": context}
        typer.echo(json.dumps(settings | {"results": results}))
        return
    columns = ("weights", "perplexity", "change", "same top token", "tokens")
    rows = [
        (
            r["weights"],
            f"{r['perplexity']:.3f}",
            f"{100 * (r['perplexity'] / plain.perplexity - 1):+.2f} %" if r is not results[0] else "-",
            f"{100 * r['same_top1']:.1f} %",
            f"{r['tokens']:,}",
        )
        for r in results
    ]
    print_figures(columns, rows)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"{file} is not UTF-8 text (byte {error.start})", "Convert it to UTF-8") from None


def _measure(
    model: ModelOptions, mode: str, text: str, tokens: int, size: tuple[int, int], progress: bool
) -> tuple[str, TokenScores]:
    """Load the model with this quantisation and predict the text.

    Returns:
        Name of the weights, and scores.
    """
    from rich.console import Console

    from paceline.bench.perplexity import score, windows
    from paceline.protocols import TargetWithHead

    llm = model.open(progress=progress, drafter=None, quantize=mode)
    target = llm.model.target
    floats = str(target.dtype).removeprefix("torch.") if isinstance(target, TargetWithHead) else "as it is"
    name = floats if mode == "none" else mode
    plain, marked = llm.tokenizer.encode(text, special=False), llm.tokenizer.encode(text)
    front = marked[: len(marked) - len(plain)]  # tokens that the tokenizer adds before a text
    length = min(size[0], target.context_length - len(front))
    pieces = windows(plain[:tokens], length, size[1], front)
    with Console(stderr=True, quiet=not progress).status(f"reading {name}"):
        return name, score(target, pieces)
