"""Measure tokens per round by acceptance rule, temperature, draft shape and drafter.

The target is the demo model; the drafters are the demo model with noise in its weights: each matrix W becomes
W + noise * std(W) * N(0, 1). They simulate draft models whose greedy choices agree with the target's choices at the
rate in the table (measured at temperature 0 with drafts of one token). All cases answer the same Spec-Bench questions.
The script measures no times. At temperature 0, all rules are equal to `match`, so only `match` runs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from common import RESULTS, Grid, Question, load_prompts, pick, progress, provenance, report, tree_option, write
from torch import Tensor

import paceline
from paceline import LLM, DraftBudget, Sampling, Stats
from paceline.bench.figures import tokens_per_round
from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.loader import Loaded
from paceline.checkpoints.model_config import read_config
from paceline.drafters.model import DraftModel
from paceline.models.decoder import Decoder
from paceline.sampling.sampler import RuleName

RULES: tuple[RuleName, ...] = get_args(RuleName)


class Noisy(Mapping[str, Tensor]):
    """A checkpoint's tensors with Gaussian noise in each matrix, at `share` times the matrix's standard deviation."""

    def __init__(self, tensors: Mapping[str, Tensor], share: float) -> None:
        self._tensors, self._share = tensors, share

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.ndim < 2:
            return tensor
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        return tensor + self._share * tensor.float().std() * noise

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def drafter_of(loaded: Loaded, noise: float) -> DraftModel:
    """Return the same model with noise in its weights."""
    checkpoint = open_checkpoint(loaded.path)
    tensors, device = Noisy(checkpoint.tensors, noise), loaded.target.device
    return DraftModel(
        Decoder(read_config(checkpoint.config), tensors, torch.bfloat16, device), loaded.target.vocab_size
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table."""

    noise: float
    shape: str
    rule: RuleName
    temperature: float


def cases(noises: Sequence[float], shapes: Sequence[str], temperatures: Sequence[float]) -> list[Case]:
    """Return every combination, leaving out rules that equal `match`."""
    combined = itertools.product(noises, shapes, RULES, temperatures)
    return [Case(*c) for c in combined if c[2] == "match" or c[3] > 0.0]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one case."""

    case: Case
    prompt: int | str
    stats: Stats


def measure(llm: LLM, case: Case, prompts: Sequence[Question], tokens: int) -> list[Sample]:
    """Answer all prompts, each with its own seed."""
    how = Sampling(max_new_tokens=tokens, temperature=case.temperature, rule=case.rule)
    return [Sample(case, p.id, llm.generate(p.text, replace(how, seed=int(p.id))).stats) for p in prompts]


def agreement(loaded: Loaded, drafter: DraftModel, prompts: Sequence[Question], tokens: int) -> float:
    """Return the share of drafted tokens where the drafter's greedy choice equals the target's."""
    llm = LLM(loaded, drafter, DraftBudget.chain(1))
    stats: list[Stats] = [llm.generate(p.text, Sampling(max_new_tokens=tokens)).stats for p in prompts]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats)


def mean(samples: Sequence[Sample]) -> float:
    """Return tokens per round over all samples."""
    return tokens_per_round([s.stats for s in samples]) or 0.0


def interval(samples: Sequence[Sample], draws: int = 1000) -> tuple[float, float]:
    """Return a 95 % percentile-bootstrap interval of `mean` over prompts, the same in every run."""
    generator = random.Random(0)
    values = sorted(mean(generator.choices(samples, k=len(samples))) for _ in range(draws))
    return values[round(draws * 0.025)], values[draws - 1 - round(draws * 0.025)]


def grid(samples: Sequence[Sample], shape: str, noise: float, agrees: float) -> Grid:
    """Return a table with a row per rule and a column per temperature."""
    own = [s for s in samples if s.case.shape == shape and s.case.noise == noise]
    temperatures = sorted({s.case.temperature for s in own})
    rows = []
    for rule in RULES:
        label = next(s.stats.guarantee for s in own if s.case.rule == rule)
        cells = [[s for s in own if (s.case.rule, s.case.temperature) == (rule, t)] for t in temperatures]
        rows.append([rule, label, *[_cell(cell) for cell in cells]])
    title = f"Tokens per round, {shape}, drafter with {noise} noise: greedy agreement {agrees:.0%}"
    return Grid(title, ["rule", "guarantee", *[f"T={t:g}" for t in temperatures]], rows)


def _cell(samples: Sequence[Sample]) -> str:
    if not samples:
        return "as match"
    low, high = interval(samples)
    return f"{mean(samples):.2f} [{low:.2f}, {high:.2f}]"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=int, default=13, help="number of questions, spread evenly over the 13 categories (13)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="maximum new tokens per reply (64)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[0.05, 0.08], help="noise of each drafter (0.05 0.08)"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.5, 0.7, 1.0], help="temperatures (0 0.5 0.7 1)"
    )
    parser.add_argument("--chain", type=int, default=5, help="draft length of the chain (5)")
    parser.add_argument(
        "--tree", type=tree_option, default=DraftBudget(16, 5, 4), help="tree as NODES,DEPTH,BRANCH (16,5,4)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    prompts = pick(load_prompts(), args.prompts)
    source = provenance(**vars(args))
    loaded = paceline.load("demo", dtype="bfloat16", device="cpu", drafter=None).model
    tree: DraftBudget = args.tree
    shapes = {f"chain of {args.chain}": DraftBudget.chain(args.chain), f"tree of {tree.nodes} nodes": tree}
    samples: list[Sample] = []
    agrees: dict[float, float] = {}
    for noise in args.noise:
        drafter = drafter_of(loaded, noise)
        agrees[noise] = agreement(loaded, drafter, prompts, args.tokens)
        llms = {name: LLM(loaded, drafter, shape) for name, shape in shapes.items()}
        for case in progress(cases([noise], list(shapes), args.temperatures), f"noise {noise}"):
            samples += measure(llms[case.shape], case, prompts, args.tokens)
    grids = [grid(samples, shape, noise, agrees[noise]) for noise in args.noise for shape in shapes]
    report(grids)
    result: dict[str, Any] = {
        "provenance": source,
        "agreement": agrees,
        "samples": [asdict(s) | {"stats": s.stats.as_dict()} for s in samples],
    }
    write("rules", result, grids, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
