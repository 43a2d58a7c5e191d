"""What makes a draft model cheap: bits, a trimmed head and an early stop, on code prompts, one option after the other.

All variants share one target and take turns, reply by reply. Tokens per second are of processor time with one thread
by default, which other programs on the machine disturb less; every text is compared with plain decoding's.

    python benchmarks/drafts.py --model qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, fail, median, progress, provenance, report, write

from paceline.checkpoints.loader import load_model
from paceline.drafters.factory import open_drafter
from paceline.llm import LLM
from paceline.types import DraftBudget

PROMPTS = (
    "Write a Python function that merges two sorted lists, and explain each step.",
    "Write a Python class for an LRU cache with get and put in O(1), with type hints and docstrings.",
    "Write a JavaScript function debounce(fn, ms) and show how to use it in a search box.",
    "Fix this Python code and return the whole file:\n\ndef mean(xs):\n    s = 0\n    for x in xs\n        s += x\n"
    "    return s / len(x)\n\ndef var(xs):\n    m = mean(xs)\n    return mean([(x - m) ** 2 for x in xs]\n",
)
VARIANTS: dict[str, tuple[dict[str, Any], DraftBudget | None]] = {
    "the file's own codes, 4 tokens": ({"quantize": "int8", "draft_vocab": 0}, DraftBudget.chain(4)),
    "4 bits, 4 tokens": ({"draft_vocab": 0}, DraftBudget.chain(4)),
    "4 bits, trimmed head, 4 tokens": ({}, DraftBudget.chain(4)),
    "4 bits, trimmed head, early stop": ({}, None),
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, quantize="auto")
    systems = {"plain": LLM(loaded)}
    for name, (options, size) in VARIANTS.items():
        systems[name] = LLM(loaded, open_drafter(f"model:{args.draft}", loaded, **options), size)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    turns = [(prompt, temperature) for prompt in PROMPTS for temperature in args.temperatures]
    for llm in systems.values():
        llm.generate(PROMPTS[0], max_new_tokens=16)
    for turn, (prompt, temperature) in enumerate(progress(turns, "replies")):
        names = [*systems]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, own = time.perf_counter(), time.process_time()
            out = systems[name].generate(prompt, max_new_tokens=args.tokens, temperature=temperature, seed=1)
            wall, own = time.perf_counter() - wall, time.process_time() - own
            stats = {"rounds": out.stats.rounds, "drafted": out.stats.drafted, "accepted": out.stats.accepted}
            one = {"temperature": temperature, "tokens": list(out.token_ids), "wall": wall, "processor": own} | stats
            found[name].append(one)
    write(args.name, *_results(args, found), args.out)


def _results(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> Any:
    grids = []
    for temperature in args.temperatures:
        rows = []
        for name, runs in found.items():
            chosen = [
                (run, plain)
                for run, plain in zip(runs, found["plain"], strict=True)
                if run["temperature"] == temperature
            ]
            if any(run["tokens"] != plain["tokens"] for run, plain in chosen):
                fail(f"{name} wrote another text")
            tokens = sum(len(run["tokens"]) for run, _ in chosen)
            ratio = median([plain["processor"] / run["processor"] for run, plain in chosen])
            rows.append(
                [
                    name,
                    f"{tokens / sum(run['processor'] for run, _ in chosen):.1f}",
                    f"{ratio:.2f}",
                    f"{median([plain['wall'] / run['wall'] for run, plain in chosen]):.2f}",
                    f"{tokens / sum(run['rounds'] for run, _ in chosen):.2f}",
                    f"{sum(run['drafted'] for run, _ in chosen) / sum(run['rounds'] for run, _ in chosen):.2f}",
                ]
            )
        titles = ["", "tok/s of processor time", "over plain", "over plain, wall", "tokens/round", "drafted/round"]
        grids.append(Grid(f"T = {temperature}", titles, rows))
    lines = [
        f"{len(PROMPTS)} code prompts, {args.tokens} tokens, {args.threads} thread(s); ratios: medians over prompts"
    ]
    report(grids, lines)
    return {"provenance": provenance(**{k: str(v) for k, v in vars(args).items()}), "runs": found}, grids, lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="drafts", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
