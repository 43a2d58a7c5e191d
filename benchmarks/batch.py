"""How much faster is a batch than one prompt after the other?

The same prompts at several widths (requests that share a pass), interleaved round by round; width 1 is the library's
own single stream, with and without a drafter. Every width must write the same tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, fail, load_prompts, median, pick, progress, provenance, report, write

import paceline
from paceline import LLM, Completion, Sampling
from paceline.drafters.suffix import Suffix


def main() -> None:
    args = _arguments()
    prompts = [p.text for p in pick([p for p in load_prompts() if len(p.text) < 600], args.prompts)]
    loaded = paceline.load(args.model, drafter=None)
    systems = {"none": loaded, "suffix": LLM(loaded.model, Suffix())}
    how = Sampling(max_new_tokens=args.tokens, temperature=args.temperature, seed=1)
    cells = [(name, width) for name in systems for width in args.widths]
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    tokens = 0
    texts: list[list[int]] | None = None
    for llm in systems.values():
        llm.generate(prompts[:1], how)  # warm
    for turn in progress(range(args.rounds), "rounds"):
        for name, width in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
            began = time.perf_counter()
            done: list[Completion] = systems[name].generate(prompts, how, width=width)
            seconds[name, width].append(time.perf_counter() - began)
            ids = [c.token_ids for c in done]
            tokens = sum(map(len, ids))
            if texts is not None and ids != texts:
                fail(f"width {width} with drafter {name} wrote other tokens")
            texts = ids
    alone = seconds["none", args.widths[0]]
    rows = [
        (
            name,
            width,
            tokens / median(seconds[name, width]),
            median(a / b for a, b in zip(alone, seconds[name, width], strict=True)),
        )
        for name, width in cells
    ]
    grid = Grid(
        f"{len(prompts)} prompts, {tokens} tokens, T={args.temperature:g}, prefill included",
        ["drafter", "width", "tok/s", f"over width {args.widths[0]} without drafter"],
        [(name, str(width), f"{speed:.1f}", f"{ratio:.2f}x") for name, width, speed, ratio in rows],
    )
    lines = ["all widths and drafters wrote the same tokens"]
    report([grid], lines)
    result: dict[str, Any] = {
        "provenance": provenance(**vars(args) | {"out": str(args.out)}),
        "guarantee": loaded.guarantee,
        "tokens": tokens,
        "seconds": {f"{name} {width}": times for (name, width), times in seconds.items()},
    }
    write("batch", result, [grid], lines, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
