"""Measure passes of 1 to 16 rows and prefill after 256 to 30,000 tokens, compared with llama.cpp.

Every system runs in its own process and keeps one text. The systems alternate: at each depth, each system reads up to
that depth, and then each measures passes over additional rows, which it does not keep. Changes in the machine's speed
therefore affect all systems equally. A pass computes the logits of all its rows, like the verification of a draft.
`paceline:int8` stores keys and values in 8 bits, if this version has the option. llama.cpp runs with flash attention on
and off (`fa`, `plain`).

    python benchmarks/fetch_models.py
    pip install llama-cpp-python==0.3.36
    python benchmarks/long.py --model 1.5b
    python benchmarks/long.py --model demo --depths 256 1000 --passes 3 --systems paceline
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, fail, median, progress, provenance, report, write
from real_models import model_path, peak_megabytes, prompt_ids

SYSTEMS = ("paceline", "paceline:int8", "llama.cpp:fa", "llama.cpp:plain")
ROOM = 64
"""Positions after the longest text, for the measured rows."""

Score = Callable[[Sequence[int]], object]
"""Function that computes the logits of rows after the text without keeping the rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a system at a depth: seconds to read from the previous depth, or pass milliseconds by rows."""

    system: str
    depth: int
    seconds: float = 0.0
    peak_mb: float = 0.0
    passes: dict[str, list[float]] | None = None


# Systems


def open_paceline(path: str, kv_type: str, positions: int) -> tuple[Callable[[Sequence[int]], None], Score]:
    import paceline
    from paceline.types import Draft, Want
    from paceline.verify.tree import chunk_end, pack, pack_prefix

    options = {"kv_type": kv_type} if kv_type else {}
    target = paceline.load(path, drafter=None, **options).model.target
    cache = target.new_cache()
    slot = cache.acquire(positions)

    def read(tokens: Sequence[int]) -> None:
        start = cache.lengths[slot]
        while (done := cache.lengths[slot]) < start + len(tokens):
            chunk = tokens[done - start : chunk_end(done) - start]
            rows = pack_prefix(chunk, slot, done, target.device)
            target.forward(rows, cache, Want("none"))
            cache.commit(rows, [range(1, len(chunk))])

    def score(tokens: Sequence[int]) -> None:
        rows = pack([tokens[0]], [Draft.chain(tokens[1:])], [slot], [cache.lengths[slot]], target.device)
        target.forward(rows, cache, Want("all"))

    return read, score


def open_llama_cpp(path: str, attention: str, positions: int) -> tuple[Callable[[Sequence[int]], None], Score]:
    from llama_cpp import Llama

    count = os.cpu_count()
    flash = attention == "fa"
    llama = Llama(path, n_ctx=positions, n_threads=count, n_threads_batch=count, flash_attn=flash, verbose=False)

    def score(tokens: Sequence[int]) -> None:
        llama._ctx.kv_cache_seq_rm(-1, llama.n_tokens, -1)
        llama._batch.set_batch(batch=tokens, n_past=llama.n_tokens, logits_all=True)
        llama._ctx.decode(llama._batch)

    return llama.eval, score


def serve_commands(system: str, path: str, positions: int) -> None:
    """Answer commands on stdin: {"read": ids} to read tokens, or {"rows": [ids, ...]} to time passes."""
    name, _, variant = system.partition(":")
    read, score = {"paceline": open_paceline, "llama.cpp": open_llama_cpp}[name](path, variant, positions)
    print(json.dumps({"ready": system}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        began = time.perf_counter()
        if "read" in command:
            read(command["read"])
            answer: Any = {"seconds": time.perf_counter() - began, "peak_mb": peak_megabytes()}
        else:
            answer = [_timed(score, tokens) for tokens in command["rows"]]
        print(json.dumps(answer), flush=True)


def _timed(score: Score, tokens: Sequence[int]) -> float:
    began = time.perf_counter()
    score(tokens)
    return (time.perf_counter() - began) * 1e3


class System:
    """A process that runs `serve_commands`."""

    def __init__(self, name: str, path: str, positions: int) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve", json.dumps([name, path, positions])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self._answer()

    def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            fail(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def opened(names: Sequence[str], path: str, positions: int) -> Iterator[list[System]]:
    with ExitStack() as stack:
        systems = []
        for name in names:
            systems.append(System(name, path, positions))
            stack.callback(systems[-1].close)
        yield systems


# Measuring


def measure(systems: Sequence[System], args: argparse.Namespace, ids: Sequence[int]) -> Iterator[Measured]:
    """Let all systems read up to each depth, and measure their passes there in turn."""
    dice, done = random.Random(0), 0
    for turn, depth in enumerate(progress(args.depths, "depths")):
        order = [*systems[turn % len(systems) :], *systems[: turn % len(systems)]]
        for system in order:
            yield Measured(system.name, depth, **system.ask(read=ids[done:depth]))
        done = depth
        for number in range(args.passes):
            for system in order if number % 2 else order[::-1]:
                lines = [[dice.choice(ids) for _ in range(rows)] for rows in args.rows]
                found = system.ask(rows=lines)
                yield Measured(system.name, depth, passes={str(n): [x] for n, x in zip(args.rows, found, strict=True)})


class Results:
    """The measurements, by system and depth."""

    def __init__(self, found: Sequence[Measured], args: argparse.Namespace) -> None:
        self._found, self._systems, self._depths, self._rows = found, args.systems, args.depths, args.rows

    def passes(self, system: str, depth: int, rows: int) -> list[float]:
        """Return the milliseconds of all passes except the first, which is a warm-up."""
        own = [m.passes[str(rows)][0] for m in self._found if (m.system, m.depth) == (system, depth) and m.passes]
        return own[1:] or own

    def _read(self, system: str) -> list[Measured]:
        return [m for m in self._found if m.system == system and m.passes is None]

    def grids(self) -> list[Grid]:
        return [self._pass_grid(), self._ratio_grid(), self._reading_grid()]

    def _pass_grid(self) -> Grid:
        rows = [
            [system, str(depth), *(f"{median(self.passes(system, depth, n)):.1f}" for n in self._rows)]
            for depth in self._depths
            for system in self._systems
        ]
        return Grid("Time of a pass, ms (median)", ["system", "context", *(f"{n} rows" for n in self._rows)], rows)

    def _ratio_grid(self) -> Grid:
        """Return medians of ratios. A ratio compares two passes that were measured directly after each other."""
        first, rows = self._systems[0], []
        for depth in self._depths:
            for other in self._systems[1:]:
                pairs = (
                    zip(self.passes(other, depth, n), self.passes(first, depth, n), strict=True) for n in self._rows
                )
                rows.append([other, str(depth), *(f"{median([a / b for a, b in pair]):.2f}" for pair in pairs)])
        columns = ["system", "context", *(f"{n} rows" for n in self._rows)]
        return Grid(f"Time relative to {first} (median of ratios)", columns, rows)

    def _reading_grid(self) -> Grid:
        rows = []
        for system in self._systems:
            read, seconds = self._read(system), 0.0
            for one in read:
                seconds += one.seconds
                rows.append([system, str(one.depth), f"{one.depth / seconds:.0f}", f"{one.peak_mb:.0f}"])
        rows.sort(key=lambda row: int(row[1]))
        return Grid("Prefill", ["system", "prompt tokens", "tok/s", "peak memory MB"], rows)


def main() -> None:
    args = _arguments()
    if args.serve:
        serve_commands(*json.loads(args.serve))
        return
    path = str(model_path(args.model))
    (_, ids) = prompt_ids(path, [max(args.depths)])
    source = provenance(**vars(args))
    with opened(args.systems, path, max(args.depths) + ROOM) as systems:
        found = list(measure(systems, args, ids))
    grids = Results(found, args).grids()
    report(grids)
    result = {"provenance": source, "measured": [asdict(one) for one in found]}
    write(f"long-{Path(args.model).name.removesuffix('.gguf')}", result, grids, folder=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5b", help="demo, 1.5b, 0.5b, a GGUF file or a folder (1.5b)")
    parser.add_argument(
        "--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS, help="systems to compare; the first is the reference"
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[256, 2000, 6000, 16000, 30000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16], help="rows of a pass (1 4 8 16)")
    parser.add_argument("--passes", type=int, default=15, help="passes per system, depth and number of rows (15)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.depths.sort()
    return args


if __name__ == "__main__":
    main()
