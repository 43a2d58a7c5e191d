"""`paceline compile`: the C++ kernels ahead of their first use."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer


def compile_kernels(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a line.")] = False,
) -> None:
    """Compile the CPU runner for this machine, or say why that cannot be. Otherwise the first model loaded does it."""
    from paceline.kernels.cpu.build import built_for, compiled, library_path, loaded

    begin, there = time.perf_counter(), library_path().is_file()
    path = compiled()
    kernels = loaded(path)
    facts = {
        "path": str(path),
        "built_for": built_for(kernels),
        "compiled": not there,
        "seconds": time.perf_counter() - begin,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    took = "was there already" if there else f"compiled in {facts['seconds']:.1f} s"
    typer.echo(f"{path}: {facts['built_for']}, {took}")
