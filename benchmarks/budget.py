"""Break down the time of a round by part and number of rows, and compare it with the time to read the weights.

Parts are timed separately and alternate: matrix products (of all layers, then of the head), attention (a pass after the
prefix minus a pass after two tokens), the rest of the layers (norms, rotary factors, activations, rounding, barriers),
sampling and acceptance, and Python. The time to read the weights is their size divided by the memory bandwidth that
`paceline doctor` measures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, median, provenance, report, write

import paceline
from paceline import Sampling
from paceline.bench.doctor.machine import bandwidth as read_bandwidth
from paceline.kernels.cpu.matrix import NativeLinear
from paceline.models.decoder import Decoder
from paceline.models.layers import Dense, Layer
from paceline.types import Draft, Rows, Want
from paceline.verify.tree import pack, pack_prefix

ROWS = (1, 4, 8, 16, 32)


def main() -> None:
    args = _arguments()
    llm = paceline.load(args.model, quantize=args.quantize, drafter=None)
    target = llm.model.target
    if not isinstance(target, Decoder) or not target._stack.native:
        raise SystemExit("error: this benchmark needs Paceline's CPU kernels, but this machine uses torch's kernels")
    source = provenance(model=args.model, quantize=args.quantize, prefix=args.prefix)
    products = [product for part in target._stack._parts for layer in part.layers for product in _products(layer)]
    weights = sum(product.matrix.nbytes for product in [*products, target._head])
    bandwidth = read_bandwidth(target.device)
    lines = {rows: _line(target, products, rows, args) for rows in ROWS}
    floor = weights / bandwidth * 1e3
    extra = _round_overhead(llm)
    grid = Grid(
        f"Time of a pass after {args.prefix} tokens, ms",
        ["part", *(f"T = {rows}" for rows in ROWS)],
        [(part, *(f"{lines[rows][part]:.2f}" for rows in ROWS)) for part in lines[ROWS[0]]],
    )
    notes = [
        f"A pass reads {weights / 2**20:.0f} MiB of weights: {floor:.2f} ms at {bandwidth / 1e9:.1f} GB/s.",
        f"A round of plain decoding outside its pass (sampling, acceptance, text, Python): {extra:.2f} ms.",
    ]
    report([grid], notes)
    result = {"provenance": source, "floor_ms": floor, "bandwidth": bandwidth, "weights": weights, "parts_ms": lines}
    write(args.name, result | {"beyond_the_pass_ms": extra}, [grid], notes, args.out)


def _line(target: Decoder, products: Sequence[NativeLinear], rows: int, args: argparse.Namespace) -> dict[str, float]:
    far, near = (_after(target, length, rows) for length in (args.prefix, 2))
    inputs = {p.matrix.shape[1]: torch.randn(rows, p.matrix.shape[1]).bfloat16() for p in [*products, target._head]}
    tiny = NativeLinear(torch.zeros(16, 32, dtype=torch.bfloat16), None)
    tiny_input = torch.zeros(rows, 32, dtype=torch.bfloat16)
    whole, layers, short, multiplied, head, call = _time_alternating(
        [
            lambda: far(Want("all")),
            lambda: far(Want("none")),
            lambda: near(Want("none")),
            lambda: [product(inputs[product.matrix.shape[1]]) for product in products],
            lambda: target._head.precise(inputs[target._head.matrix.shape[1]]),  # type: ignore[attr-defined]
            lambda: [tiny(tiny_input) for _ in products],
        ],
        args.repeats,
    )
    multiplied = max(0.0, multiplied - call)
    return {
        "whole pass": whole,
        "matrix products of the layers": multiplied,
        "attention over the prefix": layers - short,
        "rest of the layers": short - multiplied,
        "head": head,
        "embedding, final norm, Python": whole - layers - head,
    }


def _after(target: Decoder, length: int, rows: int) -> Callable[[Want], object]:
    """Return a function that runs a pass of `rows` rows after a prefix. It commits nothing, so it can be repeated."""
    cache = target.new_cache()
    slot = cache.acquire(length)
    tokens = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(length)]
    prefix = pack_prefix(tokens, slot, 0, target.device)
    target.forward(prefix, cache, Want("none"))
    cache.commit(prefix, [range(1, length)])
    chain = Draft.chain([(i * 31 + 5) % 1000 for i in range(rows - 1)])
    packed: Rows = pack([7], [chain], [slot], [length], target.device)
    return lambda want: target.forward(packed, cache, want)


def _products(layer: Layer) -> list[NativeLinear]:
    assert isinstance(layer.mlp, Dense)
    gate_up: Any = layer.mlp.gate_up
    return [layer.mixer.qkv, layer.out, gate_up.linear, layer.mlp.down]  # type: ignore[list-item]


def _time_alternating(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median milliseconds of each call. The calls alternate."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return [median(times) * 1e3 for times in seconds]


def _round_overhead(llm: paceline.LLM) -> float:
    """Return the milliseconds of a plain round outside its forward pass."""
    inside = 0.0
    forward = llm.engine.target.forward

    def timed(rows: Rows, *rest: Any) -> Any:
        nonlocal inside
        began = time.perf_counter()
        out = forward(rows, *rest)
        inside += 0.0 if rows.prefill else time.perf_counter() - began
        return out

    llm.engine.target.forward = timed  # type: ignore[method-assign]
    stats = llm.generate("Write a story about a lighthouse.", Sampling(temperature=0, max_new_tokens=96)).stats
    llm.engine.target.forward = forward  # type: ignore[method-assign]
    spent = sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")
    return (spent - inside) / stats.rounds * 1e3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantize", choices=("auto", "none", "int8", "int4"), default="auto")
    parser.add_argument("--prefix", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--name", default="budget")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
