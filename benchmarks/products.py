"""Measure the time of a matrix product by weight type and number of rows, also relative to one row.

The matrix stays in the second-level cache, so the figures show arithmetic and not memory access. Weight types
alternate. Figures are the minimum CPU time of one thread. To compare two versions, run the script with another checkout
in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from common import RESULTS, Grid, provenance, report, write

from paceline.kernels.cpu.matrix import NativeLinear
from paceline.kernels.quantize import quantize

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "8 bits": 8, "4 bits": 4}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = provenance(outputs=args.outputs, width=args.width, repeats=args.repeats)
    weight = torch.randn(args.outputs, args.width)
    products = {
        name: NativeLinear(quantize(weight, kind) if isinstance(kind, int) else weight.to(kind), None)
        for name, kind in TYPES.items()
    }
    best = {name: dict.fromkeys(ROWS, float("inf")) for name in products}
    for rows in ROWS:
        x = torch.randn(rows, args.width)
        for _ in range(args.repeats):
            for name, product in products.items():
                began = time.thread_time()
                product.precise(x)
                best[name][rows] = min(best[name][rows], 1e6 * (time.thread_time() - began))
    grid = Grid(
        f"Time of a {args.width} -> {args.outputs} product, us (relative to one row)",
        ["weights", *(f"{rows} rows" for rows in ROWS)],
        [[name, *(f"{us:.1f} ({us / times[1]:.2f})" for us in times.values())] for name, times in best.items()],
    )
    report([grid])
    write(args.name, {"provenance": source, "us": best}, [grid], folder=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536, help="number of inputs (1536)")
    parser.add_argument("--outputs", type=int, default=512, help="number of outputs (512)")
    parser.add_argument("--repeats", type=int, default=40, help="number of repetitions (40)")
    parser.add_argument("--name", default="products", help="name of the result files (products)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
