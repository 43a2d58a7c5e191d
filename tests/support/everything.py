"""Run everything that can be tested: `make test-all`, or a share of it with `make test-all PART=2/4`.

Each part is one command. Its result is stored in .test-all.json, so that an interrupted run continues where it stopped:
parts that passed at the same commit are not run again if the working tree is clean.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".test-all.json"
PYTEST = (sys.executable, "-m", "pytest", "-m", "", "--disable-warnings")
PARITY = ("--prompts", "8", "--costly-prompts", "2", "--tokens", "48", "--out", tempfile.gettempdir())
PARALLEL = ("-n", "logical", "--dist", "worksteal")


@dataclass(frozen=True)
class Part:
    """A command, and its minutes on two cores. PART=K/N divides all commands by these minutes."""

    name: str
    minutes: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """The outcome of a part: pytest's closing line, wall and CPU seconds."""

    passed: bool
    summary: str
    wall: float
    cpu: float


def room(minutes: float, *names: str) -> Part:
    """Return a part with the fast and slow tests of some folders or files under tests/."""
    return Part(" ".join(names), minutes, (*PYTEST, *PARALLEL, *(f"tests/{name}" for name in names)))


def compiled_first(part: Part) -> Part:
    """Compile the kernels of all instruction sets before a part, because pytest's workers would compile some twice."""
    script = '"$0" -m tests.support.instruction_sets && exec "$@"'
    return replace(part, command=("sh", "-c", script, sys.executable, *part.command))


def parts() -> list[Part]:
    """Return all parts."""
    roots = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    return [
        compiled_first(room(8, "kernels")),
        room(14, "server"),
        room(4, "engine"),
        room(4, "drafters"),
        room(2, "verify", "functional", "sampling", "cache", "text", "files"),
        room(3, "models", "checkpoints", "vision"),
        room(4, "cli", "bench", "certify"),
        room(4, "train", "recording", "learn", *roots),
        Part("integrations", 3, (*PYTEST, "tests/integrations")),
        Part("parity with transformers", 4, (sys.executable, "benchmarks/parity.py", *PARITY)),
    ]


def share(every: list[Part], which: int, of: int) -> list[Part]:
    """Divide the parts into `of` shares with about equal minutes. Return share `which`, counted from 1, in order."""
    shares: list[list[Part]] = [[] for _ in range(of)]
    for part in sorted(every, key=lambda part: -part.minutes):
        min(shares, key=lambda chosen: sum(one.minutes for one in chosen)).append(part)
    return sorted(shares[which - 1], key=every.index)


def run(part: Part) -> Result:
    """Run a part and show its output. Return its result."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = {**os.environ, "PACELINE_EXHAUSTIVE": "1"}
    process = subprocess.Popen(part.command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    code = process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Result(code == 0, re.sub(r" in [\d.]+s.*", "", last)[:60], time.monotonic() - start, cpu)


def commit() -> str | None:
    """Return the checked-out commit, or None if files differ from it."""
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return None if changes else head.strip() or None


def stored(head: str | None) -> dict[str, Result]:
    """Read the stored results for this commit."""
    if head is None or not RESULTS.exists():
        return {}
    kept = json.loads(RESULTS.read_text())
    return {name: Result(**result) for name, result in kept["results"].items()} if kept["commit"] == head else {}


def show(chosen: list[Part], results: dict[str, Result]) -> None:
    """Print the table of parts, results and times."""
    table = Table("part", "result", "tests", "minutes", "CPU minutes")
    for part in chosen:
        result = results[part.name]
        state = "[green]passed[/green]" if result.passed else "[red]FAILED[/red]"
        table.add_row(part.name, state, result.summary, f"{result.wall / 60:.1f}", f"{result.cpu / 60:.1f}")
    done = [results[part.name] for part in chosen]
    wall, cpu = sum(result.wall for result in done), sum(result.cpu for result in done)
    table.add_row("all", "", "", f"{wall / 60:.1f}", f"{cpu / 60:.1f}")
    Console().print(table)


def main(wanted: str = "1/1") -> int:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", wanted)
    if match is None or int(match[1]) > int(match[2]):
        print(f"PART must be K/N with 1 <= K <= N, got {wanted}", file=sys.stderr)
        return 2
    chosen, head = share(parts(), int(match[1]), int(match[2])), commit()
    results = stored(head)
    for part in chosen:
        if part.name in results and results[part.name].passed:
            continue
        print(f"\n== {part.name}", flush=True)
        results[part.name] = run(part)
        kept = {name: asdict(result) for name, result in results.items()}
        RESULTS.write_text(json.dumps({"commit": head, "results": kept}, indent=1))
    show(chosen, results)
    return 0 if all(results[part.name].passed for part in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
