"""`paceline demo`: the same answer with and without speculation, and the time of both."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import LoadFlags, SamplingOptions
from paceline.cli.prompts import single_prompt
from paceline.cli.show import decode_speed, has_colour, percent, print_figures, speed, stream_reply

if TYPE_CHECKING:
    from paceline.engine.results import Completion
    from paceline.engine.stats import Stats

PROMPT = """\
Correct the grammar of this text.

My sister and me goes to the market every Saturday. The market are in the old square beside the church, and it open \
at seven. We buys bread, cheese and apples there. The man who sell the cheese know us well, and he always give us a \
piece to try. Then we walk home along the river and eats the apples on the bridge."""
"""A text to correct. Most of the answer is in the prompt, which favours drafting from the text itself."""

_WARM_UP = "Name three colours."


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Prompt to answer; by default, a text to correct.", show_default=False),
    ] = None,
    *,
    load: LoadFlags,
    sampling: SamplingOptions,
) -> None:
    """Compare the speed of an answer with and without speculation.

    The answers have at most 192 tokens, unless -n sets another length. The exit code is 1 if the two texts differ
    although this machine guarantees that they are identical bit for bit.
    """
    from rich.console import Console
    from rich.text import Text

    question = single_prompt(PROMPT if prompt is None else prompt)
    sampling.check()
    console = Console()
    console.print("[bold]Prompt[/bold]")
    console.print(Text(question))
    fast = load.load(progress=True, prefix_memory=0)  # as for `plain`
    from paceline.llm import LLM

    plain = LLM(fast.model, None)
    parameters = sampling.resolve(fast, max_new_tokens=192)
    # The first passes of a process are slower, since memory is allocated and kernels are chosen. Warm up before timing.
    with Console(stderr=True).status("warming up"):
        for llm in (fast, plain):
            llm.generate(_WARM_UP, replace(parameters, max_new_tokens=8))
    legend = Text("a terminal with colours shows accepted draft tokens in green")
    if has_colour(sys.stdout):
        legend = Text.assemble(("green", "green"), ": drafted tokens that the model accepted")
    title = Text.assemble("\n", (f"With speculation, by {fast.drafter}", "bold"), " (", legend, ")")
    console.print(title, soft_wrap=not console.is_terminal)
    drafted = stream_reply(fast, question, parameters, sys.stdout)
    # With the seed of the first answer, the second one gets the same noise, and so the same text.
    typer.echo("\n" + typer.style("Without", bold=True))
    undrafted = stream_reply(plain, question, replace(parameters, seed=drafted.stats.seed), sys.stdout)
    _report(undrafted, drafted)


def _report(plain: Completion, fast: Completion) -> None:
    from rich.console import Console

    console = Console()
    typer.echo()
    columns = ("", "tok/s", "decode tok/s", "speedup", "tokens/round", "acceptance")
    rows = [_row("plain", plain.stats, plain.stats), _row(fast.stats.drafter or "plain", fast.stats, plain.stats)]
    print_figures(columns, rows)
    differs = _first_difference(plain.token_ids, fast.token_ids)
    if differs is None:
        console.print(f"texts identical: [green]yes[/green], all {len(fast.token_ids)} tokens")
        return
    console.print(f"texts identical: [red]NO[/red], they differ at token {differs}")
    if fast.stats.guarantee == "bits":
        raise typer.Exit(1)
    console.print(
        "This machine guarantees equal texts only up to rounding. `paceline info` shows how it computes matrix "
        "products."
    )


def _row(name: str, stats: Stats, plain: Stats) -> tuple[str, ...]:
    return (
        name,
        f"{speed(stats):.1f}",
        f"{decode_speed(stats):.1f}",
        f"{speed(stats) / speed(plain):.2f}x",
        f"{stats.tokens_per_round:.2f}",
        percent(stats.acceptance) if stats.drafted else "-",
    )


def _first_difference(one: list[int], other: list[int]) -> int | None:
    """Return the first position where two replies differ, or None."""
    pairs = zip_longest(one, other)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)
