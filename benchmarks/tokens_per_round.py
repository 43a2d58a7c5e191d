"""How many tokens a round keeps, by drafter and category, over as many Spec-Bench questions as you like.

All questions of a drafter are answered in shared passes, which changes no text and no count and takes a tenth of the
time; so there are no speeds here (`paceline bench` has those). A category's figure is all its tokens by all its rounds,
the target's own token included, and the mean weighs categories alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import RESULTS, Grid, Question, load_prompts, pick, progress, provenance, report, write

import paceline
from paceline import LLM, Sampling, Stats
from paceline.bench.figures import accepted_at, tokens_per_round
from paceline.bench.systems import split_size
from paceline.bench.tables import depths
from paceline.drafters.factory import open_drafter

USUAL = ("eagle3@5", "eagle3@24x6x4", "medusa@64x4x10")


def by_category(prompts: Sequence[Question], stats: Sequence[Stats]) -> dict[str, float]:
    """Tokens per round of each category."""
    groups: dict[str, list[Stats]] = {}
    for prompt, reply in zip(prompts, stats, strict=True):
        groups.setdefault(prompt.category, []).append(reply)
    return {category: tokens_per_round(own) or 0.0 for category, own in groups.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=USUAL, help="DRAFTER@SIZE, as for paceline bench")
    parser.add_argument("--prompts", type=int, default=240, help="questions, evenly over the 13 categories (240: all)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens each, at most (96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--width", type=int, default=8, help="questions answered at once (8)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--target", default="demo", help="the model that writes (demo)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    source = provenance(**{key: str(value) if key == "out" else value for key, value in vars(args).items()})
    prompts = pick(load_prompts(), args.prompts)
    how = Sampling(max_new_tokens=args.tokens, temperature=args.temperature, seed=1)
    loaded = paceline.load(args.target, drafter=None).model
    found: list[dict[str, Any]] = []
    for name in progress(args.drafters, "drafters"):
        spec, size = split_size(name)
        llm = LLM(loaded, open_drafter(spec, loaded), size)
        stats = [done.stats for done in llm.generate([p.text for p in prompts], how, width=args.width)]
        per_round = by_category(prompts, stats)
        kept = {"accepted_at": accepted_at(stats)}
        found.append({"drafter": name, "mean": fmean(per_round.values()), "categories": per_round} | kept)
    columns = ["drafter", "mean", *found[0]["categories"]]
    rows = [[f["drafter"], f"{f['mean']:.3f}", *[f"{x:.2f}" for x in f["categories"].values()]] for f in found]
    grids = [Grid("Tokens per round", columns, rows), depths([(f["drafter"], f["accepted_at"]) for f in found])]
    report(grids)
    write("tokens-per-round", {"provenance": source, "drafters": found}, grids, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
