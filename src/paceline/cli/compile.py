"""`paceline compile`: the C++ kernels ahead of their first use."""

from __future__ import annotations

import json
import time

import typer

from paceline.cli.options import AsJson


def compile_kernels(*, as_json: AsJson = False) -> None:
    """Compile the CPU kernels now instead of at the first model load.

    If they cannot be compiled, the error says why.
    """
    from paceline.kernels.cpu.build import built_for, compiled, instruction_set, library_path, loaded

    begin, existed = time.perf_counter(), library_path(instruction_set()).is_file()
    path = compiled()
    target, seconds = built_for(loaded(path)), time.perf_counter() - begin
    if as_json:
        facts = {"path": str(path), "built_for": target, "compiled": not existed, "seconds": seconds}
        typer.echo(json.dumps(facts))
    else:
        typer.echo(f"{path}: {target}, {'compiled before' if existed else f'compiled in {seconds:.1f} s'}")
