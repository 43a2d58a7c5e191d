"""`paceline doctor`: what will speculation give here, and why no more?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import (
    DEMO,
    AllowPickle,
    ModelName,
    NamedModel,
    Quiet,
    Revision,
    Threads,
    Token,
    note,
    one_model,
    progress_wanted,
    set_threads,
)

if TYPE_CHECKING:
    from rich.table import Table


def doctor(
    named: NamedModel = None,
    *,
    model: ModelName = DEMO,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "-d", help="As for generate; without it, all that suit the model."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    quantize: Annotated[str | None, typer.Option("--quantize", help="int8 or int4, as for generate.")] = None,
    draft_quantize: Annotated[str | None, typer.Option("--draft-quantize", help="The same for the drafter.")] = None,
    threads: Threads = None,
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also the measurements, forecasts by kind of text, and what limits them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure MODEL on this machine and recommend a drafter, threads and weights.

    It takes about ten seconds for the demo model, longer for larger ones.
    """
    from rich.console import Console

    from paceline.bench.doctor.run import choose_drafters, examine
    from paceline.drafters.factory import check_spec
    from paceline.kernels.quantize import check_mode
    from paceline.llm import load

    check_spec(drafter)
    check_mode(draft_quantize, "draft_quantize")
    set_threads(threads)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "quantize": quantize,
        "revision": revision,
        "token": token,
    }
    llm = load(
        one_model(named, model), drafter=None, progress=progress_wanted(quiet), allow_pickle=allow_pickle, **options
    )
    names = choose_drafters(llm.model, drafter)
    with Console(stderr=True).status("timing passes") as status:
        if not progress_wanted(quiet):
            status.stop()
        result = examine(llm.model, names, draft_quantize, status.update)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result, details)


def _show(result: Mapping[str, Any], details: bool) -> None:
    for line in result["settings"]:
        typer.echo(line)
    for line in result["warnings"]:
        typer.echo(f"warning: {line}")
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
        console.print(_forecasts(part))
    console.print(Text("What limits it", style="bold"))
    for line in [*result["limits"], *(line for part in result["drafters"] for line in part["reasons"])]:
        console.print(Text(f"  {line}"))


def _machine(m: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"{m['cpu']}, {m['device']}, {m['threads']} threads", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("a pass, by rows", ", ".join(f"{rows}: {ms:.1f} ms" for rows, ms in m["pass_ms"].items()))
    table.add_row("a prompt", f"{m['prefill_tokens_per_second']:.0f} tokens per second")
    table.add_row("a round beside its pass", f"{m['host_ms']:.2f} ms")
    table.add_row("memory", f"{m['read_gb_per_second']:.1f} GB/s read")
    if m["floor_ms"]:
        floor = f"{m['weight_bytes'] / 1e6:.0f} MB in {m['floor_ms']:.1f} ms at best"
        table.add_row("weights of a pass", f"{floor}: {m['bandwidth_reached']:.0%} of a pass")
    return table


def _forecasts(part: Mapping[str, Any]) -> Table:
    from rich.table import Table

    costs = ", ".join(f"{size}: {ms:.2f}" for size, ms in part["draft_ms"].items())
    title = f"{part['drafter']}: {part['ratio']:.2f} times plain decoding (milliseconds of a draft by size: {costs})"
    table = Table(title=title, title_justify="left", title_style="bold", caption=f"Acceptance: {part['acceptance']}.")
    columns = ("text", "draft", "tokens/round", "tok/s", "plain tok/s", "x plain", "decoding alone", "first token")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for kind, k in part["kinds"].items():
        table.add_row(
            kind,
            "none" if k["draft"] == "0" else k["draft"],
            f"{k['tokens_per_round']:.2f}",
            f"{k['tokens_per_second']:.1f}",
            f"{k['plain_tokens_per_second']:.1f}",
            f"{k['ratio']:.2f}",
            f"{k['decode_ratio']:.2f}",
            f"{k['first_token_ms']:.0f} ms",
        )
    return table
