"""Measure 8-bit keys and values: perplexity, agreement of the most likely token, time of passes, and memory.

A model reads texts of each length with each type, and predicts their second half. Passes run after random keys and
values. Types alternate within each repetition, so that changes in the machine's speed affect all of them equally.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from attention import passes, timed
from common import RESULTS, ROOT, Grid, progress, provenance, report, write

from paceline import load
from paceline.bench.perplexity import TextWindow, TokenScores, score
from paceline.cache.kv_types import kv_dtype
from paceline.kernels.cpu.build import instruction_set
from paceline.models.decoder import Decoder

TYPES = ["bf16", "f16", "int8"]
ROWS = (1, 8)


def text() -> str:
    """Return the notes and the source code of this checkout as one text."""
    files = [*sorted((ROOT / "docs" / "notes").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def with_type(target: Decoder, name: Any) -> Decoder:
    """Set the type of keys and values for new caches of the target. Return the target."""
    target.kv_dtype = kv_dtype(name, target.dtype)
    return target


def quality(target: Decoder, types: list[str], tokens: list[int], length: int, most: int) -> dict[str, Any]:
    """Return, by type, the perplexity and the agreement with the first type for texts of `length` tokens.

    Read up to `most` tokens in total, but at least one text.
    """
    pieces = [
        TextWindow(tokens[i : i + length], length // 2) for i in range(0, max(1, most // length) * length, length)
    ]
    scores: dict[str, TokenScores] = {}
    for name in progress(types, f"reading {length} tokens"):
        scores[name] = score(with_type(target, name), pieces)
    first = scores[types[0]]
    return {
        name: {"perplexity": own.perplexity, "same_top1": first.agreement(own), "tokens": len(own.best)}
        for name, own in scores.items()
    }


def speed(target: Decoder, types: list[str], depth: int, repeats: int) -> dict[str, Any]:
    """Return, by type, the memory of `depth` tokens and the times of passes after them for each number of rows."""
    made, found = {}, {}
    for name in types:
        with_type(target, name)
        found[name] = {"bytes": target.cache_bytes(depth)}
        made |= {(name, count): call for (_, count), call in passes(target, depth, ROWS).items()}
    for (name, count), time in timed(made, repeats).items():
        found[name][f"{count} rows"] = {"milliseconds": time[0], "cpu_milliseconds": time[1]}
    return found


def quality_grid(model: str, results: dict[int, dict[str, Any]]) -> Grid:
    lines = []
    for length, each in results.items():
        first = next(iter(each.values()))["perplexity"]
        for name, own in each.items():
            change = f"{100 * (own['perplexity'] / first - 1):+.2f} %"
            numbers = f"{own['perplexity']:.3f}", change, f"{100 * own['same_top1']:.1f} %", f"{own['tokens']:,}"
            lines.append([f"{length:,}", name, *numbers])
    columns = ["text length", "type", "perplexity", "change", "same top token", "tokens predicted"]
    return Grid(f"{model}: quality", columns, lines)


def speed_grid(model: str, depth: int, found: dict[str, Any]) -> Grid:
    lines = []
    for name, own in found.items():
        times = (own[f"{count} rows"] for count in ROWS)
        each = ["{milliseconds:.1f} ({cpu_milliseconds:.1f})".format(**time) for time in times]
        lines.append([name, *each, f"{own['bytes'] / 2**20:.1f}"])
    title = f"{model}: time of a pass after {depth:,} tokens, ms (CPU time of all threads)"
    return Grid(title, ["type", *(f"{count} rows" for count in ROWS), "MiB of keys and values"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--types", nargs="+", default=TYPES, help="types to compare; the first is the reference")
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 4000], help="lengths of the texts, in tokens")
    parser.add_argument("--most", type=int, default=4000, help="maximum tokens to read at each length")
    parser.add_argument("--depth", type=int, default=6000, help="context length of the timed passes")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions of the passes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    grids, results = list[Grid](), []
    for model in args.models:
        llm = load(model, drafter=None)
        target, name = llm.model.target, llm.model.path.stem
        assert isinstance(target, Decoder)
        tokens = llm.tokenizer.encode(text()[: 8 * max([args.most, *args.lengths])])
        with torch.inference_mode():
            found = speed(target, args.types, args.depth, args.repeats)
            by_length = {length: quality(target, args.types, tokens, length, args.most) for length in args.lengths}
        grids += [quality_grid(name, by_length), speed_grid(name, args.depth, found)]
        results.append({"model": name, "quality": by_length, "passes": found})
    report(grids)
    about = {"provenance": provenance(), "kernels": instruction_set().name, "depth": args.depth}
    write("kv-int8", about | {"models": results}, grids, folder=args.out)


if __name__ == "__main__":
    main()
