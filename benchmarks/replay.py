"""Compare the predictions of `paceline replay` with measurements, on the recorded prompts and on other prompts.

Replies to the first half of the prompts are recorded without drafts, and drafters are replayed over them. Then plain
decoding and each drafter answer both halves in turn. The script compares tokens per round, and the speed relative to
plain decoding over all replies of a half. On the recorded half, the tokens per round must be equal for drafters with a
fixed draft size. Exit code 1 if they differ, or if a predicted speed is off by more than 10 % on the other half.
"""

from __future__ import annotations

import sys
import time

if "--cpu-time" in sys.argv:
    # Replace the clock before other modules import it. On a shared machine, CPU time is more reliable than wall time.
    time.perf_counter = time.process_time

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Grid, load_prompts, pick, progress, provenance, report, write

import paceline
from paceline import LLM
from paceline.bench.figures import ratio_of_sums, tokens_per_round
from paceline.bench.measure import Sample, measure
from paceline.bench.replay.predict import Candidate, CandidatePrediction, Predictor, measure_prices
from paceline.bench.systems import Comparison, own_systems, split_budget
from paceline.recording.file import Recording

NEAR = 0.10


def predictions(llm: LLM, texts: Sequence[str], comparison: Comparison) -> list[CandidatePrediction]:
    """Record plain replies, then replay the drafters over them."""
    sampling = comparison.sampling(comparison.temperatures[0])
    with tempfile.TemporaryDirectory() as folder:
        with llm.record(Path(folder) / "replies.jsonl"):
            for text in progress(texts, "recording"):
                llm.generate(text, sampling)
        replies = Recording(Path(folder) / "replies.jsonl")[:]
    predictor = Predictor(llm.model, measure_prices(llm.model, replies[0], 1))
    candidates = [Candidate(*split_budget(name)) for name in comparison.drafters]
    return [predictor.predict(candidate, replies) for candidate in progress(candidates, "replaying")]


def compared(
    prediction: CandidatePrediction, name: str, base: str, halves: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    """Return a drafter's predicted figures and its measured figures on each half."""
    row = prediction.as_dict()
    found: dict[str, Any] = {"drafter": name, "predicted": row, "measured": []}
    for half in halves:
        own, plain = ([s for s in half if s.system == system] for system in (name, base))
        ratio = ratio_of_sums([s.seconds for s in plain], [s.seconds for s in own])
        tokens = tokens_per_round([stats for s in own for stats in s.reply.stats])
        off = row["ratio"]["value"] / ratio["value"] - 1
        found["measured"].append({"ratio": ratio, "tokens_per_round": tokens, "off": off})
    return found


def grid(rows: Sequence[dict[str, Any]]) -> Grid:
    lines = []
    for row in rows:
        predicted, (same, other) = row["predicted"], row["measured"]
        cells = [f"{x['tokens_per_round']:.3f}" for x in (predicted, same, other)]
        cells += [
            f"{r['value']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
            for r in (x["ratio"] for x in (predicted, same, other))
        ]
        lines.append([row["drafter"], *cells, f"{100 * same['off']:+.1f} %", f"{100 * other['off']:+.1f} %"])
    tokens = [f"tokens/round, {what}" for what in ("replayed", "measured", "other prompts")]
    speeds = [f"x plain, {what} [95 %]" for what in ("predicted", "measured", "other prompts")]
    return Grid("Predicted and measured", ["drafter", *tokens, *speeds, "error", "error, other prompts"], lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=["suffix", "suffix@7x7x3", "eagle3@3", "suffix+eagle3@3"])
    parser.add_argument("--model", default="demo", help="model (demo)")
    parser.add_argument("--prompts", type=int, default=13, help="prompts per half (13)")
    parser.add_argument("--tokens", type=int, default=96, help="maximum new tokens per reply (96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature (0)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time instead of wall time")
    parser.add_argument("--name", default="replay", help="name of the result files (replay)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    questions = pick(load_prompts(), 2 * args.prompts)
    halves = questions[: args.prompts], questions[args.prompts :]
    source = provenance(**vars(args))
    comparison = Comparison(args.drafters, temperatures=(args.temperature,), tokens=args.tokens, threads=args.threads)
    llm = paceline.load(args.model, drafter=None, prefix_memory=0)
    found = predictions(llm, [q.text for q in halves[0]], comparison)
    systems = own_systems({"": llm}, comparison)
    answers = {system.name: answer for system, answer in systems.items()}
    samples = [s for s in progress(list(measure(answers, questions)), "comparing") if isinstance(s, Sample)]
    parts = [[s for s in samples if s.question in half] for half in halves]
    rows = [
        compared(prediction, system.name, system.base.name, parts)
        for prediction, system in zip(found, [s for s in systems if s.drafter], strict=True)
    ]
    took, saved = (sum(row["predicted"][key] for row in rows) for key in ("replay_seconds", "predicted_seconds"))
    exact = all(
        abs(row["predicted"]["tokens_per_round"] - row["measured"][0]["tokens_per_round"]) < 1e-9
        for row in rows
        if row["predicted"]["exact"]
    )
    worst = max(abs(row["measured"][1]["off"]) for row in rows)
    lines = [
        f"tokens per round on the recorded prompts {'are equal' if exact else 'DIFFER'} where the draft size is fixed",
        f"the worst prediction for other prompts is off by {worst:.1%}",
        f"replay took {took:.1f} s; running the drafters would take {saved:.1f} s, {saved / took:.0f} times as long",
    ]
    report([grid(rows)], lines)
    write(args.name, {"provenance": source, "drafters": rows, "remarks": lines}, [grid(rows)], lines)
    return 0 if exact and worst <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
