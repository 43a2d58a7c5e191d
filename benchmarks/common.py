"""Helpers for the benchmarks, and parts of `paceline.bench`. Importing this module makes `tests` importable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import track

from paceline import DraftBudget
from paceline.bench.figures import bootstrap, median
from paceline.bench.provenance import provenance
from paceline.bench.questions import Question, pick, read_questions
from paceline.bench.tables import Grid, markdown
from paceline.cli.show import print_figures

__all__ = [
    "Grid",
    "Question",
    "bootstrap",
    "console",
    "fail",
    "in_own_process",
    "load_prompts",
    "median",
    "pick",
    "progress",
    "provenance",
    "report",
    "tree_option",
    "write",
]

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "spec_bench_dev.jsonl"
RESULTS = ROOT / "benchmarks" / "results"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

T = TypeVar("T")

console = Console(width=None if sys.stdout.isatty() else 160)


def fail(message: str) -> NoReturn:
    """Print an error to stderr and exit with code 1."""
    raise SystemExit(f"error: {message}")


def in_own_process(
    script: str, task: Mapping[str, Any], environment: Mapping[str, str] | None = None, name: str = "the process"
) -> dict[str, Any]:
    """Run `script --run TASK` in a new process. Return the JSON object in the last line of its output.

    Args:
        script: Path of a benchmark that accepts `--run`. All its other arguments must be optional.
        task: Passed as JSON.
        environment: Environment variables to add.
        name: Name of the process in error messages.
    """
    command = [sys.executable, script, "--run", json.dumps(task)]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(f"{name} ended with code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def load_prompts(path: Path = PROMPTS) -> list[Question]:
    """Read all questions of a Spec-Bench file. Exit if it does not exist."""
    if not path.exists():
        fail(f"{path} does not exist: this script needs the `shared` folder next to the checkout")
    return read_questions(path)


def report(grids: Sequence[Grid], lines: Sequence[str] = ()) -> None:
    """Print tables, then lines of text."""
    for grid in grids:
        print_figures(grid.columns, grid.rows, title=grid.title)
    for line in lines:
        console.print(line, markup=False, highlight=False)


def write(
    name: str, result: Mapping[str, Any], grids: Sequence[Grid] = (), lines: Sequence[str] = (), folder: Path = RESULTS
) -> Path:
    """Write a result to `<date>-<name>.json`, and its tables to an .md file of the same name.

    Args:
        name: Name of the benchmark.
        result: Values for JSON, including "provenance".
        grids: Tables.
        lines: Lines of text after the tables.
        folder: Folder for the two files.

    Returns:
        Path of the .json file.
    """
    source = result["provenance"]
    path = folder / f"{source['date'][:10]}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if grids:
        path.with_suffix(".md").write_text(markdown(name, source, grids, lines), encoding="utf-8")
    console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return path


def tree_option(text: str) -> DraftBudget:
    """Parse NODES,DEPTH,BRANCH."""
    nodes, depth, branch = map(int, text.split(","))
    return DraftBudget(nodes, depth, branch)


def progress(items: Sequence[T], title: str) -> Iterator[T]:
    """Yield the items under a transient progress bar on stderr."""
    yield from track(items, title, console=Console(stderr=True), transient=True)
