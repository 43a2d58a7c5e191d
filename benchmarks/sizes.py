"""Compare models of 4 to 30 billion parameters with llama.cpp: load time, passes of 1, 4 and 8 rows, prefill, memory.

Every turn is a separate process, and only one runs at a time, so that large files fit into memory. The systems
alternate. A turn loads the file from a warm page cache, reads 256 tokens, measures passes, and reads a prompt of 512
tokens with an empty cache. A pass computes the logits of all its rows and keeps all rows, since llama.cpp cannot drop
rows of a recurrent model. Tokens are random, and the same for both systems. llama.cpp uses flash attention, as its own
programs do by default.

`load` is the time of the call that loads the model. `ready` is the time from the start of the process to the first
logits, including imports. `peak` is the peak resident set, which includes pages of the mapped file. `own` is the
resident memory at the end without file pages.

    python benchmarks/random_gguf.py llama-3.1-8b /tmp/llama-3.1-8b.gguf
    pip install llama-cpp-python==0.3.36
    python benchmarks/sizes.py --model /tmp/llama-3.1-8b.gguf
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import RESULTS, Grid, in_own_process, median, progress, provenance, report, write
from numpy.typing import NDArray
from real_models import model_path, peak_megabytes

SYSTEMS = ("paceline", "llama.cpp")
ROOM = 256
"""Positions after the longest text, for the measured rows."""

Found = dict[str, Any]


class System(Protocol):
    """A loaded model with one text."""

    def start(self) -> None:
        """Begin a new text."""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens, and compute at most the logits of the last one."""

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in one pass. Return all their logits."""


class Paceline:
    def __init__(self, path: str, positions: int, threads: int) -> None:
        import torch

        import paceline
        from paceline.verify import tree

        torch.set_num_threads(threads)
        self.version, self._tree, self._positions = paceline.__version__, tree, positions
        self._target = paceline.load(path, drafter=None).model.target

    def start(self) -> None:
        self._cache = self._target.new_cache()
        self._slot = self._cache.acquire(self._positions)

    def read(self, tokens: Sequence[int]) -> None:
        from paceline.types import Want

        done = 0
        while done < len(tokens):
            length = self._cache.lengths[self._slot]
            chunk = tokens[done : done + self._tree.chunk_end(length) - length]
            rows = self._tree.pack_prefix(chunk, self._slot, length, self._target.device)
            self._target.forward(rows, self._cache, Want("none"))
            self._cache.commit(rows, [range(1, len(chunk))])
            done += len(chunk)

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        from paceline.types import Draft, Want

        chain, length = Draft.chain(tokens[1:]), self._cache.lengths[self._slot]
        rows = self._tree.pack([tokens[0]], [chain], [self._slot], [length], self._target.device)
        out = self._target.forward(rows, self._cache, Want("all"))
        self._cache.commit(rows, [range(1, len(tokens))])
        return out.logits.numpy()


class LlamaCpp:
    def __init__(self, path: str, positions: int, threads: int) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        self._llama = llama_cpp.Llama(
            path, n_ctx=positions, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
        )

    def start(self) -> None:
        self._llama.reset()

    def read(self, tokens: Sequence[int]) -> None:
        self._llama.eval(tokens)

    def score(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=llama.n_tokens, logits_all=True)
        llama._ctx.decode(llama._batch)
        llama.n_tokens += len(tokens)
        return np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(len(tokens), llama.n_vocab()))


def run(system: str, path: str, began: float, ids: Sequence[int], task: Found) -> Found:
    """Measure one system in this process.

    Args:
        began: Time at which the process was started.
        ids: Token ids for the texts, in order.
        task: Options "depth", "prompt", "rows", "passes" and "threads".
    """
    opened = {"paceline": Paceline, "llama.cpp": LlamaCpp}[system]
    left = iter(ids)

    def take(count: int) -> list[int]:
        return [next(left) for _ in range(count)]

    loading = time.perf_counter()
    try:
        model: Any = opened(path, max(task["depth"], task["prompt"]) + ROOM, task["threads"])
    except Exception as error:  # a program that does not support the architecture is a result, too
        return {"error": f"{type(error).__name__}: {error}"}
    load = time.perf_counter() - loading
    model.start()
    finite = bool(np.isfinite(model.score(take(1))).all())
    ready = time.time() - began
    model.read(take(task["depth"] - 1))
    passes: dict[str, list[float]] = {str(rows): [] for rows in task["rows"]}
    for _ in range(task["passes"] + 1):  # the first turn is a warm-up
        for rows in task["rows"]:
            tokens = take(rows)
            started = time.perf_counter()
            logits = model.score(tokens)
            passes[str(rows)].append((time.perf_counter() - started) * 1e3)
            finite &= bool(np.isfinite(logits).all())
    model.start()
    prompt = take(task["prompt"])
    started = time.perf_counter()
    model.read(prompt)
    return {
        "version": model.version,
        "finite": finite,
        "load": load,
        "ready": ready,
        "prompt": task["prompt"] / (time.perf_counter() - started),
        "passes": {rows: times[1:] for rows, times in passes.items()},
        "peak_mb": peak_megabytes(),
        "own_mb": _own_megabytes(),
    }


def _own_megabytes() -> float:
    """Return the resident memory of this process without file pages, in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


def warm(path: Path) -> int:
    """Read a file into the page cache. Return its size in bytes."""
    with path.open("rb") as file:
        return sum(map(len, iter(lambda: file.read(1 << 24), b"")))


def tables(title: str, runs: dict[str, list[Found]], rows: Sequence[int]) -> tuple[list[Grid], list[str]]:
    """Return medians with ranges, and a line for each system that failed."""
    columns = ["system", "load s", "ready s", *(f"{n} rows ms" for n in rows), "prompt tok/s", "peak MB", "own MB"]
    lines, cells = [], []
    for system, turns in runs.items():
        if errors := [turn["error"] for turn in turns if "error" in turn]:
            lines.append(f"{system} cannot run this file: {errors[0]}")
            continue
        if not all(turn["finite"] for turn in turns):
            lines.append(f"{system} computes logits that are not finite")
        passes = ([ms for turn in turns for ms in turn["passes"][str(n)]] for n in rows)
        figures = [[turn[key] for turn in turns] for key in ("load", "ready")]
        figures += [*passes, *([turn[key] for turn in turns] for key in ("prompt", "peak_mb", "own_mb"))]
        cells.append([system, *map(_shown, figures)])
    return [Grid(title, columns, cells)], lines


def _shown(values: Sequence[float]) -> str:
    """Return "median (minimum to maximum)"."""
    digits = 0 if median(values) >= 100 else 1
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    args = _arguments()
    if args.run:
        print(json.dumps(run(**json.loads(args.run))))
        return
    path, source, dice = model_path(args.model), provenance(**vars(args)), random.Random(0)
    task = {key: getattr(args, key) for key in ("depth", "prompt", "rows", "passes", "threads")}
    count = args.depth + args.prompt + (args.passes + 1) * sum(args.rows)
    runs: dict[str, list[Found]] = {system: [] for system in args.systems}
    for turn in progress(range(args.turns), path.name):
        ids = [dice.randrange(40_000) for _ in range(count)]
        for system in args.systems[:: -1 if turn % 2 else 1]:
            size = warm(path)
            one = {"system": system, "path": str(path), "began": time.time(), "ids": ids, "task": task}
            runs[system].append(in_own_process(__file__, one, name=system))
    title = f"{path.name} ({size / 1e9:.2f} GB)"
    grids, lines = tables(title, runs, args.rows)
    lines += [
        f"medians (minimum to maximum) of {args.turns} processes with {args.passes} passes of each size; "
        f"passes begin after {args.depth} tokens, prompts have {args.prompt} tokens; {args.threads} threads"
    ]
    report(grids, lines)
    write(f"sizes-{path.stem}", {"provenance": source, "bytes": size, "runs": runs}, grids, lines, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5b", help="demo, 1.5b, 0.5b or a GGUF file (1.5b)")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--turns", type=int, default=3, help="processes per system (3)")
    parser.add_argument("--passes", type=int, default=4, help="passes per process and number of rows (4)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8], help="rows of a pass (1 4 8)")
    parser.add_argument("--depth", type=int, default=256, help="context length of the passes (256)")
    parser.add_argument("--prompt", type=int, default=512, help="length of the prompt, in tokens (512)")
    parser.add_argument("--threads", type=int, default=2, help="threads of both systems (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
