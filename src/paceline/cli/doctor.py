"""`paceline doctor`: how much speculation gains on this machine, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.commands import option
from paceline.cli.options import (
    AsJson,
    DraftQuantize,
    DraftVocab,
    ModelArgument,
    ModelOptions,
    Quantize,
    Quiet,
    note,
    parse_draft_vocab,
    progress_wanted,
)
from paceline.cli.show import amount, facts_table, print_figures
from paceline.cli.wrapping import say

if TYPE_CHECKING:
    from rich.table import Table


def doctor(
    argument: ModelArgument = None,
    *,
    model: ModelOptions,
    quantize: Quantize = "auto",
    drafter: Annotated[
        str | None,
        option("Drafter, as for generate.", "-d", metavar="DRAFTER", show_default="all that suit the model"),
    ] = None,
    draft_quantize: DraftQuantize = "auto",
    draft_vocab: DraftVocab = "auto",
    details: Annotated[bool, option("Also show measurements, forecasts by kind of text, and limits.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Recommend a drafter, threads and weights for this machine.

    The measurement takes about ten seconds for the demo model, and longer for larger models.
    """
    from rich.console import Console

    from paceline.bench.doctor.run import choose_drafters, examine
    from paceline.drafters.factory import check_spec
    from paceline.kernels.quantize import check_precision

    check_spec(drafter)
    check_precision(draft_quantize, "draft_quantize")
    vocab = parse_draft_vocab(draft_vocab)
    llm = model.with_model(argument).open(progress=progress_wanted(quiet), drafter=None, quantize=quantize)
    names = choose_drafters(llm.model, drafter)
    with Console(stderr=True).status("timing passes") as status:
        if not progress_wanted(quiet):
            status.stop()
        result = examine(llm.model, names, draft_quantize, vocab, status.update)  # type: ignore[arg-type]
    result["images"] = llm.vision.name if llm.vision else None
    if as_json:
        typer.echo(json.dumps(result))
        return
    for line in result["settings"]:
        say(line, err=False)
    if result["images"]:
        say(f"The model sees images ({result['images']}).", err=False)
    for line in result["warnings"]:
        say(f"warning: {line}", err=False)
    if details:
        _show_details(result)
    else:
        note("--details shows the measurements behind this.")


def _show_details(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if progress_wanted(False) else 120)
    console.print()
    console.print(_machine(result["machine"]))
    for part in result["drafters"]:
        _show_forecasts(part)
    console.print(Text("Limits", style="bold"))
    for line in [*result["limits"], *(line for part in result["drafters"] for line in part["reasons"])]:
        console.print(Text(f"  {line}"))


def _machine(m: Mapping[str, Any]) -> Table:
    rows = [
        ("pass, by rows", ", ".join(f"{rows}: {ms:.1f} ms" for rows, ms in m["pass_ms"].items())),
        ("prefill", f"{m['prefill_tokens_per_second']:.0f} tokens per second"),
        ("other work per round", f"{m['host_ms']:.2f} ms"),
        ("memory", f"{m['read_gb_per_second']:.1f} GB/s read"),
    ]
    if m["kv_bytes_per_token"]:
        rows.append(("keys and values", f"{amount(m['kv_bytes_per_token'], 'bytes')} per token"))
    if m["floor_ms"]:
        floor = f"{m['weight_bytes'] / 1e6:.0f} MB in at least {m['floor_ms']:.1f} ms"
        rows.append(("reading the weights", f"{floor}, {m['bandwidth_reached']:.0%} of a pass"))
    return facts_table(rows, title=f"{m['cpu']}, {m['device']}, {m['threads']} threads", title_justify="left")


_FORECAST = {
    "tokens/round": "{tokens_per_round:.2f}",
    "tok/s": "{tokens_per_second:.1f}",
    "plain tok/s": "{plain_tokens_per_second:.1f}",
    "x plain": "{ratio:.2f}",
    "decode x plain": "{decode_ratio:.2f}",
    "first token": "{first_token_ms:.0f} ms",
}
"""Columns of a forecast: heading -> cell."""


def _show_forecasts(part: Mapping[str, Any]) -> None:
    costs = ", ".join(f"{size}: {ms:.2f}" for size, ms in part["draft_ms"].items())
    title = f"{part['drafter']}: {part['ratio']:.2f} times plain decoding (milliseconds per draft, by size: {costs})"
    rows = [
        (kind, "none" if k["draft"] == "0" else k["draft"], *(cell.format(**k) for cell in _FORECAST.values()))
        for kind, k in part["kinds"].items()
    ]
    caption = f"Acceptance: {part['acceptance']}."
    print_figures(("text", "draft", *_FORECAST), rows, title=title, caption=caption)
