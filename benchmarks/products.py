"""Time of one matrix product by type of weights and number of rows, relative to one row.

The matrix stays in the second-level cache, so figures show arithmetic, not memory. Types are timed in turns, as
processor time of one thread; figures are minima. Run it with another checkout in PYTHONPATH to compare two versions.
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
        name: NativeLinear(quantize(weight, of) if isinstance(of, int) else weight.to(of), None)
        for name, of in TYPES.items()
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
        f"A product of {args.width} -> {args.outputs}, us",
        ["weights", *(f"{rows} rows" for rows in ROWS)],
        [[name, *(f"{us:.1f} ({us / of[1]:.2f})" for us in of.values())] for name, of in best.items()],
    )
    report([grid])
    write(args.name, {"provenance": source, "us": best}, [grid], folder=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536, help="inputs (1536)")
    parser.add_argument("--outputs", type=int, default=512, help="outputs (512)")
    parser.add_argument("--repeats", type=int, default=40, help="times each (40)")
    parser.add_argument("--name", default="products", help="name of the result files (products)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
