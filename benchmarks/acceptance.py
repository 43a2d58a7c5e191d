"""Measure acceptance by draft size, drafter and category. `paceline doctor` predicts speeds from these figures.

Each drafter is replayed over the demo model's greedy replies, with every draft size that the controller may choose.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, Grid, progress, provenance, report

import paceline
from paceline.bench.doctor.acceptance import STORED, Acceptance, observe, write_replies
from paceline.bench.questions import pick, read_questions
from paceline.bench.replay.predict import format_budget
from paceline.drafters.factory import open_drafter
from paceline.engine.draft_length import Controller
from paceline.types import DraftBudget

EXTRA_SIZES = {"eagle3": [DraftBudget.chain(4), DraftBudget.chain(5)]}
"""Drafter -> sizes to measure in addition to the sizes that the controller considers on this machine."""


def table(found: Acceptance, budgets: Sequence[DraftBudget]) -> dict[str, dict[str, list[float]]]:
    """Return size -> category -> [tokens, rows] per round."""
    gains = {budget: {name: kind.gains[budget] for name, kind in found.kinds.items()} for budget in budgets}
    return {
        format_budget(budget): {name: [round(g.tokens, 3), round(g.rows, 3)] for name, g in by_kind.items()}
        for budget, by_kind in gains.items()
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=["eagle3", "suffix", "ngram", "medusa"])
    parser.add_argument(
        "--prompts", type=int, default=39, help="number of questions, spread evenly over the 13 categories (39)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="maximum new tokens per reply (96)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--out", type=Path, default=STORED, help="output file (the file that ships with the package)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    questions = pick(read_questions(PROMPTS), args.prompts)
    texts: dict[str, list[str]] = {}
    for question in questions:
        texts.setdefault(question.category, []).append(question.text)
    loaded = paceline.load("demo", drafter=None).model
    replies = write_replies(loaded, texts, args.tokens)
    result: dict[str, Any] = {
        **{key: provenance()[key] for key in ("command", "date", "commit")},
        "file": loaded.path.name,
        "questions": len(questions),
        "tokens": args.tokens,
    }
    tables, grids = {}, []
    for name in progress(args.drafters, "drafters"):
        drafter = open_drafter(name, loaded)
        if drafter is None:
            continue
        budgets = sorted(
            {*Controller(drafter.draft).sizes[1:], *EXTRA_SIZES.get(name, [])}, key=lambda budget: budget.nodes
        )
        found, _ = observe(loaded, drafter, budgets, replies)
        tables[name] = table(found, budgets)
        result["prompt_tokens"] = {kind: round(k.prompt, 1) for kind, k in found.kinds.items()}
        rows = [[budget, *[f"{tokens:.2f}" for tokens, _ in line.values()]] for budget, line in tables[name].items()]
        grids.append(Grid(f"{name}: tokens per round", ["draft", *found.kinds], rows))
    report(grids)
    args.out.write_text(json.dumps(result | {"drafters": tables}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
