"""Measure decoding while other programs keep the cores busy, with the default number of threads and with one thread.

The other programs are busy loops in separate processes. The two thread counts alternate from reply to reply. The
default is one thread per physical core, and the kernels' thread pool uses only as many of them as speed up decoding.
The goal for the default is at least 0.9 of the speed of the faster one.

    python benchmarks/busy.py --model qwen2.5-coder-1.5b.gguf
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from common import RESULTS, Grid, median, progress, provenance, report, write

import paceline

PROMPT = "Write a Python function that merges two sorted lists, and explain each step."


def speed(llm: paceline.LLM, threads: int, tokens: int) -> float:
    """Return the tokens per second of one reply after its first token."""
    torch.set_num_threads(threads)
    llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    sampling = paceline.Sampling(max_new_tokens=tokens, ignore_eos=True)
    times = [time.perf_counter() for _ in llm.stream(PROMPT, sampling)]
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    args = _arguments()
    source = provenance(**{key: str(value) for key, value in vars(args).items()})
    llm = paceline.load(args.model, drafter=None, prefix_memory=0)
    most = torch.get_num_threads()
    rows, found = [], {}
    for loops in args.loops:
        runs: dict[int, list[float]] = {most: [], 1: []}
        with ExitStack() as stack:
            for _ in range(loops):
                stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            for turn in progress(range(args.repeats), f"{loops} busy loops"):
                for threads in sorted(runs) if turn % 2 else sorted(runs, reverse=True):
                    runs[threads].append(speed(llm, threads, args.tokens))
        found[loops] = runs
        each = {threads: median(values) for threads, values in runs.items()}
        rows.append(
            [str(loops), *(f"{value:.1f}" for value in each.values()), f"{each[most] / max(each.values()):.2f}"]
        )
    columns = ["busy loops", f"default ({most} threads), tok/s", "1 thread, tok/s", "default relative to best"]
    grids = [Grid(f"{Path(args.model).name}, {os.cpu_count()} cores", columns, rows)]
    report(grids)
    write("busy", {"provenance": source, "runs": found}, grids, folder=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
