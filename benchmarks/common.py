"""What the benchmarks share: prompts, where two texts part, intervals, provenance, tables and result files."""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from paceline import Tree

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "spec_bench_dev.jsonl"
RESULTS = ROOT / "benchmarks" / "results"

T = TypeVar("T")

console = Console(width=None if sys.stdout.isatty() else 160)


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 1."""
    raise SystemExit(f"error: {message}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A Spec-Bench question: its first turn."""

    id: int
    category: str
    text: str


def load_prompts(path: Path = PROMPTS) -> list[Prompt]:
    """Every question of a Spec-Bench file; ends the program where there is none."""
    if not path.exists():
        fail(f"{path} is not there: this script needs the shared folder beside the checkout")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Prompt(row["id"], row["category"], row["turns"][0]) for row in rows]


def pick(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, as evenly over the categories as their sizes allow, and over each category's length.

    The same ones every time. They come in turns, one of each category, so that a run cut short is even too.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    quotas = _quotas({name: len(group) for name, group in groups.items()}, count)
    chosen = {name: [groups[name][i * len(groups[name]) // n] for i in range(n)] for name, n in quotas.items() if n}
    turns = max((len(group) for group in chosen.values()), default=0)
    return [group[turn] for turn in range(turns) for group in chosen.values() if turn < len(group)]


def _quotas(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of each category: one each in turn, until `count` are given out or none is left."""
    quotas = dict.fromkeys(sizes, 0)
    left = min(count, sum(sizes.values()))
    while left:
        for name, size in sizes.items():
            if left and quotas[name] < size:
                quotas[name] += 1
                left -= 1
    return quotas


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two token sequences part: the first unequal position, the shorter's end, or None if they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text leaves the reference's. `ours`, `theirs`: the two tokens there (None: that text has ended).

    `margin`: the reference's best logit there less its second best. `gap`: its logit of `theirs` less that of
    `ours`, never below the margin. `excused`: a near tie that rounding may decide either way.
    """

    prompt: int
    position: int
    ours: int | None
    theirs: int | None
    margin: float | None
    gap: float | None
    excused: bool


def classify(
    prompt: int, ours: Sequence[int], theirs: Sequence[int], logits: Sequence[Tensor], limit: float
) -> Divergence | None:
    """The first divergence of `ours` from `theirs`, or None. `logits[i]` [V] are those that chose `theirs[i]`.

    Excused only if our token's logit is within `limit` of the reference's choice: a small top-2 margin alone would
    also excuse a third token that has no business there. A text that just ends, or goes on, is never excused.
    """
    at = first_difference(ours, theirs)
    if at is None:
        return None
    mine = ours[at] if at < len(ours) else None
    other = theirs[at] if at < len(theirs) else None
    if other is None:
        return Divergence(prompt, at, mine, None, None, None, False)
    row = logits[at].double()
    best = torch.topk(row, 2).values
    margin = float(best[0] - best[1])
    gap = None if mine is None else float(row[other] - row[mine])
    return Divergence(prompt, at, mine, other, margin, gap, gap is not None and max(margin, gap) < limit)


def median(values: Iterable[float]) -> float:
    """The median; NaN of nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def bootstrap(values: Sequence[float], draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """A percentile-bootstrap interval of the median over independent `values`; the same one every time."""
    if not values:
        return float("nan"), float("nan")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    cut = round(draws * (1 - level) / 2)
    return medians[cut], medians[draws - 1 - cut]


def provenance(**settings: Any) -> dict[str, Any]:
    """What a number needs to be worth keeping: command, code, versions, machine, load, date, settings."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "versions": _versions("paceline", "torch", "transformers", "numpy", "gguf", "scikit-learn"),
        "machine": {
            "cpu": _cpu(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
            "system": platform.platform(),
        },
        "settings": settings,
    }


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions(*packages: str) -> dict[str, str | None]:
    """scikit-learn is among them because transformers drafts at another length where it is installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@dataclass(frozen=True, slots=True)
class Grid:
    """A table that can be shown in the terminal and written as Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"


def report(grids: Sequence[Grid], lines: Sequence[str] = ()) -> None:
    """Print tables, then lines."""
    for grid in grids:
        grid.show()
    for line in lines:
        console.print(line, markup=False, highlight=False)


def write(
    name: str, result: Mapping[str, Any], grids: Sequence[Grid] = (), lines: Sequence[str] = (), folder: Path = RESULTS
) -> Path:
    """`<date>-<name>.json` with the whole result, which holds its "provenance"; beside it an .md of the tables."""
    source = result["provenance"]
    path = folder / f"{source['date'][:10]}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if grids:
        text = "\n".join([_heading(name, source), *[grid.markdown() for grid in grids], *[f"- {s}" for s in lines]])
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return path


def _heading(name: str, source: Mapping[str, Any]) -> str:
    machine, versions = source["machine"], source["versions"]
    used = ", ".join(f"{key} {value}" for key, value in versions.items() if value)
    commit = f"{(source['commit'] or 'no commit')[:12]}{' with changes' if source['dirty'] else ''}"
    return (
        f"# {name}, {source['date'][:10]}\n\n`{source['command']}` at {commit}; {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['threads']} threads; {used}.\n"
    )


def tree_option(text: str) -> Tree:
    """An option NODES,DEPTH,BRANCH."""
    nodes, depth, branch = map(int, text.split(","))
    return Tree(nodes, depth, branch)


def progress(items: Sequence[T], title: str) -> Iterator[T]:
    """The items, with a bar on stderr that goes away."""
    yield from track(items, title, console=Console(stderr=True), transient=True)
