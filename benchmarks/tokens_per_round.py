"""How many tokens a round keeps, by drafter and category, over as many Spec-Bench questions as you like.

All questions of a drafter are answered in shared passes, which changes no text and no count and takes a tenth of the
time; so there are no speeds here (`learned.py` has those). A category's figure is all its tokens by all its rounds, the
target's own token included, and the mean weighs categories alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import RESULTS, Grid, load_prompts, pick, progress, provenance, report, write
from learned import accepted_at, by_category, tokens_per_round
from model_free import Reply, Sample

import paceline
from paceline import LLM, Sampling
from paceline.cli.options import parse_draft
from paceline.drafters.make import make_drafter, to_tree
from paceline.models.loader import load_model

USUAL = ("eagle3@5", "eagle3@24x6x4", "medusa@64x4x10")


def measure(llm: LLM, name: str, args: argparse.Namespace) -> list[Sample]:
    """Every question's reply, without times."""
    prompts = pick(load_prompts(), args.prompts)
    how = Sampling(max_new_tokens=args.tokens, temperature=args.temperature, seed=1)
    done = llm.generate([p.text for p in prompts], how, width=args.width)
    return [Sample(name, p, 0, 0, 0.0, Reply(c.token_ids, c.stats)) for p, c in zip(prompts, done, strict=True)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=USUAL, help="DRAFTER@DRAFT, as for paceline generate")
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
    loaded = paceline.load(args.target, drafter=None).model
    found: list[dict[str, Any]] = []
    for name in progress(args.drafters, "drafters"):
        spec, _, draft = name.partition("@")
        llm = LLM(loaded, make_drafter(spec, loaded, load_model), to_tree(parse_draft(draft or "auto")))
        samples = measure(llm, name, args)
        per_round = by_category(samples, tokens_per_round)
        found.append({"drafter": name, "mean": fmean(per_round.values()), "categories": per_round})
        found[-1]["accepted_at"] = accepted_at(samples)
    columns = ["drafter", "mean", *found[0]["categories"]]
    rows = [[f["drafter"], f"{f['mean']:.3f}", *[f"{x:.2f}" for x in f["categories"].values()]] for f in found]
    depths = [[f["drafter"], *[f"{share:.2f}" for share in f["accepted_at"]]] for f in found]
    grids = [
        Grid("Tokens per round", columns, rows),
        Grid("Share of rounds kept to depth", ["drafter", *map(str, range(1, 7))], depths),
    ]
    report(grids)
    write("tokens-per-round", {"provenance": source, "drafters": found}, grids, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
