"""Measure passes after long contexts, for verification rows and prompt chunks, with random weights of real shapes.

A few layers are enough, because all layers take the same time (Qwen2.5-1.5B has 28). The cache is filled with random
keys and values. Depths and rows alternate within each repetition, so that changes in the machine's speed affect all of
them equally.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from common import RESULTS, Grid, median, progress, provenance, report, write

from paceline.cache.kv_types import size_of, to_stored
from paceline.cache.slab import SlabCache
from paceline.kernels.cpu.build import instruction_set
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.testing import random_tensors
from paceline.types import Draft, Want
from paceline.verify.tree import pack, pack_prefix

QWEN = ModelConfig("llama", 256, 1536, 4, 12, 2, 128, 8960, 1 << 17, tied=True)
SHAPES = {
    "Qwen2.5-1.5B": QWEN,
    "Llama-3.2-3B": replace(QWEN, hidden=3072, heads=24, kv_heads=8, ffn=8192),
    "Gemma-3-1B": replace(QWEN, hidden=1152, heads=4, kv_heads=1, head_dim=256, ffn=6912),
}
K = TypeVar("K")
CHUNK, CPU = 512, torch.device("cpu")


@torch.inference_mode()
def filled(target: Decoder, depth: int) -> SlabCache:
    """Return a cache whose slot 0 holds `depth` tokens with random keys and values."""
    cache = target.new_cache()
    assert isinstance(cache, SlabCache)
    slot = cache.acquire(depth + CHUNK)
    for start in range(0, depth, CHUNK):
        rows = pack_prefix([0] * min(CHUNK, depth - start), slot, start, CPU)
        cache.begin(rows)
        cache.commit(rows, [range(1, rows.counts[0])])
    for slab in cache.slabs:
        for tensor in slab.tensors:
            tensor[..., :depth, :] = to_stored(torch.randn(*tensor.shape[:-2], depth, size_of(tensor)), tensor)
    return cache


def passes(target: Decoder, depth: int, rows: Sequence[int]) -> dict[tuple[int, int], Callable[[], object]]:
    """Return functions that run a pass of each number of rows after `depth` tokens. None of them commits."""
    cache, made = filled(target, depth), {}
    for count in rows:
        if count == CHUNK:
            packed = pack_prefix([1] * CHUNK, 0, depth, CPU)
        else:
            packed = pack([1], [Draft.chain([1] * (count - 1))], [0], [depth], CPU)
        made[depth, count] = partial(target.forward, packed, cache, Want("none"))
    return made


def measure(
    target: Decoder, depths: Sequence[int], rows: Sequence[int], repeats: int
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the times of each pass by (depth, rows). See `timed`."""
    return timed({key: call for depth in depths for key, call in passes(target, depth, rows).items()}, repeats)


def timed(calls: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, tuple[float, float]]:
    """Return the median wall and CPU milliseconds of each call, with CPU time over all threads. The calls alternate."""
    times: dict[K, list[tuple[float, float]]] = {key: [] for key in calls}
    for _ in progress(range(repeats), "passes"):
        for key, call in calls.items():
            call()  # brings the CPU caches into the same state as in decoding
            began, used = time.perf_counter(), time.process_time()
            call()
            times[key].append((1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - used)))
    return {key: (median([wall for wall, _ in each]), median([cpu for _, cpu in each])) for key, each in times.items()}


def grid(
    shape: str, depths: Sequence[int], rows: Sequence[int], found: dict[tuple[int, int], tuple[float, float]]
) -> Grid:
    """Return a table with a line per depth."""
    lines = [[f"{depth:,}", *("{:.1f} ({:.1f})".format(*found[depth, count]) for count in rows)] for depth in depths]
    title = f"{shape}: time of a pass of {QWEN.layers} layers, ms (CPU time of all threads), by context and rows"
    return Grid(title, ["context", *map(str, rows)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["Qwen2.5-1.5B"])
    parser.add_argument("--depths", nargs="+", type=int, default=[256, 2000, 6000, 16000])
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16, CHUNK],
        help=f"rows of a pass; {CHUNK} is a prompt chunk",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    grids, results = [], []
    for shape in args.shapes:
        config = SHAPES[shape]
        target = Decoder(config, Quantised(random_tensors(config, scale=0.02), "int4"), torch.bfloat16, CPU)
        found = measure(target, args.depths, args.rows, args.repeats)
        grids.append(grid(shape, args.depths, args.rows, found))
        each = product(args.depths, args.rows)
        results += [{"shape": shape, "depth": d, "rows": n, "wall_cpu_ms": found[d, n]} for d, n in each]
    report(grids)
    kernels = instruction_set().name
    result = {"provenance": provenance(kernels=kernels), "layers": QWEN.layers, "passes": results}
    write(f"attention-{kernels}", result, grids, folder=args.out)


if __name__ == "__main__":
    main()
