"""What a token costs as the text grows, what a limit that is not reached costs, and what the cache holds.

One verify pass of plain decoding (one row that counts) and of a 15-node tree at several lengths of context,
interleaved; the same reply under `max_new_tokens` 64 and 8000; the cache's memory against the figure computed from
the config.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, bootstrap, load_prompts, median, progress, provenance, report, write

import paceline
from paceline import Draft, Sampling
from paceline.protocols import KVCache, Target
from paceline.types import Rows, Want
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix


def main() -> None:
    args = _arguments()
    llm = paceline.load(args.model, drafter=None)
    target = llm.model.target
    text = [t for p in load_prompts() for t in llm.tokenizer.encode(p.text)]
    cache = target.new_cache()
    slots = {length: _fed(target, cache, text[:length]) for length in progress(args.lengths, "prefill")}
    drafts = {"1 row": Draft(), "tree of 15": Draft(tuple(range(1, 16)), (0, 0, 0, *range(1, 13)))}
    cells = [(name, length) for name in drafts for length in args.lengths]
    seconds: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for turn in progress(range(args.rounds), "passes"):
        for name, length in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
            rows = pack([text[length]], [drafts[name]], [slots[length]], [length], target.device)
            seconds[name, length].append(_timed(target, cache, rows))
    grids = [_passes(seconds, args.lengths), _limits(llm, args), _memory(llm, args.lengths)]
    report(grids)
    result: dict[str, Any] = {
        "provenance": provenance(**vars(args) | {"out": str(args.out)}),
        "seconds": {f"{name}, {length}": times for (name, length), times in seconds.items()},
    }
    write("context", result, grids, [], args.out)


def _fed(target: Target, cache: KVCache, text: list[int]) -> int:
    slot = cache.acquire()
    for done in range(0, len(text), PREFILL_ROWS):
        chunk = text[done : done + PREFILL_ROWS]
        rows = pack_prefix(chunk, slot, done, target.device)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(chunk))])
    return slot


def _timed(target: Target, cache: KVCache, rows: Rows) -> float:
    began = time.perf_counter()
    target.forward(rows, cache, Want())
    return time.perf_counter() - began


def _passes(seconds: dict[tuple[str, int], list[float]], lengths: list[int]) -> Grid:
    rows = []
    for (name, length), times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[name, lengths[0]], strict=True)]
        low, high = bootstrap(ratios)
        rows.append((name, str(length), f"{median(times) * 1e3:.1f}", f"{median(ratios):.2f}x [{low:.2f}, {high:.2f}]"))
    return Grid("A pass by length of context", ["pass", "tokens before it", "ms", f"over {lengths[0]}"], rows)


def _limits(llm: paceline.LLM, args: argparse.Namespace) -> Grid:
    """The same text under two limits: a stop token ends both after as many tokens."""
    prompt = "Name three colours."
    reply = llm.generate(prompt, Sampling(max_new_tokens=48)).token_ids
    times: dict[int, list[float]] = {64: [], 8000: []}
    for _ in range(5):
        for limit, seconds in times.items():
            began = time.perf_counter()
            done = llm.generate(prompt, Sampling(max_new_tokens=limit), on_chunk=_stop_after(len(reply)))
            seconds.append(time.perf_counter() - began)
            assert done.token_ids == reply
    base = times[64]
    rows = [
        (str(limit), f"{median(s) * 1e3:.0f}", f"{median(a / b for a, b in zip(s, base, strict=True)):.2f}x")
        for limit, s in times.items()
    ]
    return Grid(f"{len(reply)} tokens under two limits", ["max_new_tokens", "ms", "over 64"], rows)


def _stop_after(count: int) -> Any:
    left = [count]

    def on_chunk(chunk: paceline.Chunk) -> bool:
        left[0] -= 1
        return left[0] > 0

    return on_chunk


def _memory(llm: paceline.LLM, lengths: list[int]) -> Grid:
    target: Any = llm.model.target
    rows = []
    for length in lengths:
        cache = target.new_cache()
        _fed(target, cache, [1] * length)
        computed = target.config.cache_bytes(cache.capacity, target.dtype.itemsize)
        rows.append((str(length), str(cache.capacity), f"{cache.nbytes / 2**20:.1f}", f"{computed / 2**20:.1f}"))
    return Grid("Memory of the cache", ["tokens", "positions held", "MiB held", "MiB computed"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
