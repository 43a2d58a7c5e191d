"""Write the training data of the demo model's heads: self-generated and existing prompts, with the model's answers.

Self-generated prompts and their greedy answers come first. They take 20 minutes per thousand on two cores, and an
interrupted run continues where it stopped. Answers to existing prompts follow, with a quota for each source. To train
with the two files, use `paceline train --prompts DIR/prompts.jsonl --answers DIR/answers.jsonl`. The data contains no
benchmark questions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import PROMPTS

import paceline
from paceline.train.answers import AnswerPlan
from paceline.train.prompts import Prompts
from paceline.train.self_prompts import write_prompts
from paceline.train.writing import write_answers

SHARED = PROMPTS.parents[1]
QUOTAS = {"self_instruct_user": None, "self_instruct_seed": None, "t0": 1500, "gsm8k_train": 500}
"""Number of answers from each source, or None for all."""

Row = Mapping[str, Any]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def self_generated(folder: Path, count: int) -> tuple[list[Row], list[Row]]:
    """Return prompts that the demo model generated, and its answers, with ids that no existing prompt has."""
    llm = paceline.load("demo", drafter=None)
    prompts, answers = folder / "own-prompts.jsonl", folder / "own-answers.jsonl"
    write_prompts(llm, prompts, count, width=48)
    write_answers(llm, Prompts(prompts), answers, AnswerPlan((0.0,), answer_tokens=256, width=48))
    replies = [row | {"id": f"own-{row['id']}"} for row in rows(answers)]
    known = {row["id"] for row in replies}
    questions = [{"id": f"own-{row['id']}", "prompt": row["prompt"]} for row in rows(prompts)]
    return [row for row in questions if row["id"] in known], replies


def existing(seed: int) -> tuple[list[Row], list[Row]]:
    """Return existing prompts and answers, limited to the quota of each source."""
    prompts = {row["id"]: row for row in rows(SHARED / "prompts" / "train_prompts.jsonl")}
    answers = list(rows(SHARED / "demo_answers.jsonl"))
    chosen = []
    for source, quota in QUOTAS.items():
        of_source = [row for row in answers if prompts[row["id"]]["source"] == source]
        chosen += of_source if quota is None else random.Random(seed).sample(of_source, quota)
    used = dict.fromkeys(row["id"] for row in chosen)
    return [{"id": i, "prompt": prompts[i]["prompt"]} for i in used], chosen


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for the two files")
    parser.add_argument("--own", type=int, default=1400, help="number of prompts that the model generates (1400)")
    parser.add_argument("--seed", type=int, default=5, help="seed for choosing among existing answers (5)")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    parts = self_generated(args.folder, args.own), existing(args.seed)
    for name, index in (("prompts", 0), ("answers", 1)):
        with (args.folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for part in parts for row in part[index])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
