"""`paceline demo`: the same answer with and without speculation, timed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import LoadOptions, SamplingOptions
from paceline.cli.prompts import single_prompt
from paceline.cli.show import Display, decode_speed, in_colour, percent, speed

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.engine.results import Completion
    from paceline.engine.stats import Stats
    from paceline.llm import LLM
    from paceline.sampling.parameters import Sampling

PROMPT = """\
Correct the grammar of this text.

My sister and me goes to the market every Saturday. The market are in the old square beside the church, and it open \
at seven. We buys bread, cheese and apples there. The man who sell the cheese know us well, and he always give us a \
piece to try. Then we walk home along the river and eats the apples on the bridge."""
"""A text to edit: much of the answer stands in the prompt, which is where drafts from the text itself gain most."""

_WARM_UP = "Name three colours."


def demo(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; without it, a text to correct.", show_default=False)
    ] = None,
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
) -> None:
    """Watch speculation work: an answer with it, the same again without, and how long both took.

    An answer has 192 tokens at most, unless -n gives another length.

    EmbeddingAndHead with exit code 1 if the two texts differ on a machine that promises them equal bit for bit.
    """
    question = single_prompt(PROMPT if prompt is None else prompt)
    sampling.check()
    _show_prompt(question)
    fast = load.load(progress=True)
    from paceline.llm import LLM

    plain = LLM(fast.model, None)
    wanted = sampling.of(fast, max_new_tokens=192)
    _warm_up([fast, plain], wanted)
    with_it = _write(f"With speculation, by {fast.drafter}", fast, question, wanted, _legend())
    # The seed that the first one drew: the same noise, hence the same text.
    without = _write("Without", plain, question, replace(wanted, seed=with_it.stats.seed), "")
    _report(without, with_it)


def _show_prompt(question: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print("[bold]Prompt[/bold]")
    console.print(Text(question))


def _legend() -> str:
    if not in_colour(sys.stdout):
        return "accepted draft tokens are green on a terminal that takes colours"
    return typer.style("green", fg="green") + ": drafted tokens that the model accepted; the others it added itself"


def _warm_up(models: list[LLM], sampling: Sampling) -> None:
    """The first passes of a process are slower: memory is touched, kernels are chosen. Neither answer pays for it."""
    from rich.console import Console

    with Console(stderr=True).status("warming up"):
        for llm in models:
            llm.generate(_WARM_UP, replace(sampling, max_new_tokens=8))


def _write(title: str, llm: LLM, prompt: str, sampling: Sampling, legend: str) -> Completion:
    typer.echo("\n" + typer.style(title, bold=True) + (f" ({legend})" if legend else ""))
    display = Display(sys.stdout)
    try:
        return llm.generate(prompt, sampling, on_chunk=display.write)
    finally:
        display.end()


def _report(plain: Completion, fast: Completion) -> None:
    from rich.console import Console

    console = Console()
    console.print()
    console.print(_table(plain.stats, fast.stats))
    differs = _first_difference(plain.token_ids, fast.token_ids)
    if differs is None:
        console.print(f"texts identical: [green]yes[/green], all {len(fast.token_ids)} tokens")
        return
    console.print(f"texts identical: [red]NO[/red], they differ from token {differs} on")
    if fast.stats.guarantee == "bits":
        raise typer.Exit(1)
    console.print("This machine promises equal texts up to rounding; try --dtype float32.")


def _table(plain: Stats, fast: Stats) -> Table:
    from rich.table import Table

    table = Table("", "tok/s", "decode tok/s", "speedup", "tokens/round", "acceptance")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, stats in (("plain", plain), (fast.drafter or "plain", fast)):
        table.add_row(
            name,
            f"{speed(stats):.1f}",
            f"{decode_speed(stats):.1f}",
            f"{speed(stats) / speed(plain):.2f}x",
            f"{stats.tokens_per_round:.2f}",
            percent(stats.acceptance) if stats.drafted else "-",
        )
    return table


def _first_difference(one: list[int], other: list[int]) -> int | None:
    """The position where two replies part, or None."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
