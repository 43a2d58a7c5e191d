"""Predict a tensor-parallel pass with 2, 4 and 8 ranks from measured parts, and measure it with 1 and 2 ranks.

One measured part is the CPU time of one rank's share of a layer and of the head, without sums over ranks. The other is
an exchange of the same number of bytes between two processes on this machine, over gloo and through shared memory. Its
figures are the minimum and the median wall time of many exchanges, since other programs may use the cores too. The
prediction for n ranks adds two exchanges per layer to a rank's share of the computation. Each exchange takes the
latency and the transfer time of n - 1 times the bytes. The model has the sizes of Llama 3.2 1B, with random 4-bit
weights. Every rank has one thread.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from common import Grid, median, provenance, report, write
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.divided import DividedDecoder
from paceline.models.lazy import Quantised
from paceline.models.mirror import Mirror
from paceline.models.ranks import Ranks
from paceline.testing import random_tensors
from paceline.types import Draft, Want
from paceline.verify.tree import pack, pack_prefix

SIZES = ModelConfig("llama", 16032, 2048, 2, 32, 8, 64, 8192, 8192, tied=False)
LAYERS, VOCABULARY, PREFIX = 16, 128256, 256
"""Layers and vocabulary of the whole model, and context length. Two layers and an eighth of the head are measured."""
CPU = torch.device("cpu")


class SingleRank(Ranks):
    """One of `count` ranks, without the other ranks. It skips sums over ranks."""

    def __init__(self, count: int) -> None:
        self.rank, self.count, self.shared_memory = 0, count, None

    def check_alike(self, facts: object) -> None: ...

    def share_memory(self) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x

    def send(self, message: bytes) -> None: ...

    def leave(self) -> None: ...


def tensors_of(config: ModelConfig) -> Quantised:
    return Quantised(random_tensors(config, scale=0.02), "int4")


def make(count: int, tensors: Quantised, mirror: Mirror | None = None) -> Decoder:
    """Return one rank's part of the model."""
    if count == 1:
        return Decoder(SIZES, tensors, torch.bfloat16, CPU)
    return DividedDecoder(
        SIZES, tensors, torch.bfloat16, CPU, lambda done, total: None, mirror or Mirror(SingleRank(count))
    )


def passes(target: Decoder, rows: int) -> Callable[[Want], object]:
    """Return a function that runs a pass of `rows` rows after a text. It commits nothing, so it can be repeated."""
    cache = target.new_cache()
    slot = cache.acquire(PREFIX)
    fed = pack_prefix([*range(PREFIX)], slot, 0, CPU)
    target.forward(fed, cache, Want("none"))
    cache.commit(fed, [range(1, PREFIX)])
    batch = pack([1], [Draft.chain([*range(2, rows + 1)])], [slot], [PREFIX], CPU)
    return lambda want: target.forward(batch, cache, want)


def compute(counts: Sequence[int], rows: int, rounds: int) -> dict[int, dict[str, float]]:
    """Return CPU milliseconds of one layer and of the whole head, by number of ranks. The cases alternate."""
    tensors = tensors_of(SIZES)
    runs = {count: passes(make(count, tensors), rows) for count in counts}
    wants = {"two": Want("none"), "one": Want("none", layers=1), "all": Want()}
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for count, run in runs.items():
            for name, want in wants.items():
                began = time.thread_time()
                run(want)
                times.setdefault((count, name), []).append(time.thread_time() - began)
    medians = {key: 1e3 * median(values) for key, values in times.items()}
    return {
        count: {
            "layer": medians[count, "two"] - medians[count, "one"],
            "head": (medians[count, "all"] - medians[count, "two"]) * VOCABULARY / SIZES.vocab_size,
        }
        for count in counts
    }


def exchanges(ranks: Ranks, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return milliseconds of a sum over two ranks, by number of float32 values."""
    found = {}
    for size in sizes:
        x, times = torch.ones(size), []
        for _ in range(rounds):
            began = time.perf_counter()
            ranks.sum(x)
            times.append(1e3 * (time.perf_counter() - began))
        found[size] = {"minimum": min(times), "median": median(times)}
    return found


def measure_passes(mirror: Mirror, rows: int, rounds: int) -> dict[int, dict[str, float]]:
    """Return wall milliseconds of a pass through two layers and an eighth of the head, with 1 and with 2 ranks."""
    tensors = tensors_of(SIZES)
    divided = make(2, tensors, mirror)
    mirror.follow()
    runs = {1: passes(make(1, tensors), rows), 2: passes(divided, rows)}
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for count, run in runs.items():
            began = time.perf_counter()
            run(Want())
            times[count].append(1e3 * (time.perf_counter() - began))
    return {count: {"minimum": min(values), "median": median(values)} for count, values in times.items()}


def predicted(part: dict[str, float], count: int, latency: float, per_byte: float, rows: int) -> float:
    """Return the predicted milliseconds of a pass through the whole model."""
    exchange = 0.0 if count == 1 else latency + per_byte * (count - 1) * rows * SIZES.hidden * 4
    logits = 0.0 if count == 1 else latency + per_byte * (count - 1) / count * rows * VOCABULARY * 4
    return LAYERS * (part["layer"] + 2 * exchange) + part["head"] + exchange + logits


def rank_environment(port: int) -> dict[str, str]:
    """Return the environment variables of a rank, as torchrun sets them."""
    return {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, sizes = options.rows, (options.rows * SIZES.hidden, 16 * options.rows * SIZES.hidden)
    if "RANK" in os.environ:
        return measure(rows, options.rounds, sizes, {})
    parts = compute((1, 2, 4, 8), rows, options.rounds)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= rank_environment(probe.getsockname()[1])
    follower = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": "1"})
    os.environ["RANK"] = "0"
    try:
        measure(rows, options.rounds, sizes, parts)
    finally:
        follower.wait(60)


def measure(rows: int, rounds: int, sizes: Sequence[int], parts: dict[int, dict[str, float]]) -> None:
    """Measure exchanges and passes of two ranks. Rank 0 also predicts and writes the result."""
    ranks = Ranks()
    found = {"gloo": exchanges(ranks, sizes, 10 * rounds)}
    ranks.share_memory()
    found["memory"] = exchanges(ranks, sizes, 10 * rounds)
    mirror = Mirror(ranks)
    measured = measure_passes(mirror, rows, rounds)
    mirror.end()
    kinds = ("minimum", "median")
    lines = []
    result: dict[str, Any] = {"provenance": provenance(rows=rows), "parts": parts, "exchanges": found}
    result |= {"measured": measured, "predicted": {}}
    for way, kind in product(found, kinds):
        small, large = (found[way][size][kind] for size in sizes)
        per_byte = max(0.0, (large - small) / (4 * (sizes[1] - sizes[0])))
        latency = max(0.0, small - per_byte * 4 * sizes[0])
        times = {count: predicted(part, count, latency, per_byte, rows) for count, part in parts.items()}
        result["predicted"][f"{way}, {kind}"] = {"latency": latency, "per_byte": per_byte, "times": times}
        lines.append([f"{way}, {kind}", f"{1e3 * latency:.0f}", f"{1e-6 / per_byte if per_byte else 0:.2f}"])
        lines[-1] += [f"{times[count]:.0f} ({times[1] / times[count]:.2f}x)" for count in parts]
    compute_rows = [[str(n), f"{part['layer']:.2f}", f"{part['head']:.1f}"] for n, part in parts.items()]
    grids = [
        Grid("Computation of one rank, CPU ms", ["ranks", "layer", "head"], compute_rows),
        Grid(
            f"Predicted pass of {rows} rows through {LAYERS} layers, ms",
            ["exchange", "latency, us", "GB/s", *(f"{n} ranks" if n > 1 else "1 rank" for n in parts)],
            lines,
        ),
        Grid(
            "Measured pass through 2 layers and an eighth of the head, ms of wall time",
            ["", "1 rank", "2 ranks"],
            [[kind, *(f"{one[kind]:.1f}" for one in measured.values())] for kind in kinds],
        ),
    ]
    report(grids)
    write("ranks", result, grids)


if __name__ == "__main__":
    main()
