"""Is speculation ever slower than plain decoding? Prompts and drafters made to defeat it, and every kind of question.

Plain decoding and each drafter answer the same prompts next to each other, in an order that rotates; a figure is the
median over prompts of tokens per second over plain's, end to end, with a 95 % bootstrap interval. The cases: prompts of
random words; questions answered at a high temperature; drafters that are always wrong, one that costs nothing and one
that costs what the learned one costs; and the questions of each category. Asked for: at least 0.97 where drafting is
defeated, and an interval above 0.98 in the worst category.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, RESULTS, Grid, progress, provenance, report, write

import paceline
from paceline import LLM, Drafter, Sampling
from paceline.bench.figures import bootstrap, median, ratios
from paceline.bench.measure import MeasuredReply, Sample, Write, measure
from paceline.bench.questions import Question, pick, read_questions
from paceline.bench.systems import split_size
from paceline.checkpoints.loader import Loaded
from paceline.drafters.factory import open_drafter
from paceline.drafters.ngram import NGram
from paceline.drafters.wrapper import DrafterWrapper
from paceline.protocols import Ask
from paceline.types import Draft

PLAIN = "plain"
DEFEATED, WORST = 0.97, 0.98


class Spoilt(DrafterWrapper):
    """Drafts as the drafter inside, at its cost, and says another token everywhere."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        super().__init__(inner)
        self._vocab = vocab_size

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        return [replace(d, tokens=tuple((t + 1) % self._vocab for t in d.tokens), q={}, carried=None) for d in drafts]


class Blind(NGram):
    """Drafts tokens at random as long as it is let, at no cost."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._dice, self._vocab = random.Random(0), vocab_size

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft.chain(self._dice.choices(range(self._vocab), k=ask.budget.depth)) for ask in asks]


@dataclass(frozen=True, slots=True)
class Case:
    """What makes it hard, for which drafters. `least`: the ratio that is asked for, of the median where `kind` is
    "defeated" and of the interval's lower end where it is "category"."""

    name: str
    kind: str
    questions: Sequence[Question]
    drafters: Sequence[str]
    sampling: Sampling

    @property
    def least(self) -> float:
        return DEFEATED if self.kind == "defeated" else WORST


def cases(args: argparse.Namespace) -> list[Case]:
    """All of them, or those named by --only."""
    questions = read_questions(args.questions)
    few = pick(questions, args.prompts)
    greedy = Sampling(max_new_tokens=args.tokens, ignore_eos=True)
    hot = replace(greedy, temperature=args.temperature, seed=1)
    found = [
        Case("random words", "defeated", random_words(questions, args.prompts), args.drafters, greedy),
        Case(f"temperature {args.temperature:g}", "defeated", few, args.drafters, hot),
        Case("always wrong", "defeated", few, ("blind", f"spoilt {args.drafters[0]}"), greedy),
    ]
    natural = replace(greedy, ignore_eos=False)
    for category in dict.fromkeys(q.category for q in questions):
        own = pick([q for q in questions if q.category == category], args.per_category)
        found.append(Case(category, "category", own, args.drafters, natural))
    return [case for case in found if not args.only or case.name in args.only or case.kind in args.only]


def random_words(questions: Sequence[Question], count: int) -> list[Question]:
    """Prompts of words drawn from all questions, of lengths from a line to a page."""
    dice, words = random.Random(0), sorted({word for q in questions for word in q.text.split()})
    lengths = [dice.choice((20, 60, 180)) for _ in range(count)]
    return [Question(f"words {i}", "random", " ".join(dice.choices(words, k=n))) for i, n in enumerate(lengths)]


def make(name: str, loaded: Loaded) -> LLM:
    """DRAFTER or DRAFTER@SIZE as elsewhere, "blind", or "spoilt DRAFTER"."""
    spec, size = split_size(name)
    vocab = loaded.target.vocab_size
    drafter: Drafter | None = Blind(vocab) if spec == "blind" else None
    if drafter is None:
        drafter = open_drafter(spec.removeprefix("spoilt "), loaded)
    if drafter is not None and spec.startswith("spoilt "):
        drafter = Spoilt(drafter, vocab)
    return LLM(loaded, drafter, size)


def writer(llm: LLM, sampling: Sampling) -> Write:
    def answer(text: str) -> MeasuredReply:
        done = llm.generate(text, sampling)
        return MeasuredReply(done.token_ids, 0.0, done.stats)

    return answer


def run(case: Case, writers: dict[str, LLM], repeats: int) -> dict[str, Any]:
    """The case's part of the result."""
    systems = {name: writer(writers[name], case.sampling) for name in (PLAIN, *case.drafters)}
    samples = [s for s in measure(systems, case.questions, repeats) if isinstance(s, Sample)]
    figures = []
    for name in case.drafters:
        found = ratios(samples, name, PLAIN)
        low, high = bootstrap(found)
        held = (median(found) if case.kind == "defeated" else low) >= case.least
        drafted = sum(s.reply.stats.drafted for s in samples if s.system == name and s.reply.stats)
        rounds = sum(s.reply.stats.rounds for s in samples if s.system == name and s.reply.stats)
        figures.append({"drafter": name, "median": median(found), "low": low, "high": high, "held": held})
        figures[-1] |= {"drafted_per_round": drafted / rounds, "ratios": found}
    raw = [s.as_dict() for s in samples]
    return {"case": case.name, "kind": case.kind, "least": case.least, "drafters": figures, "samples": raw}


def grid(results: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    for r in results:
        for f in r["drafters"]:
            cells = [f"{f['median']:.3f}", f"{f['low']:.3f} to {f['high']:.3f}", f"{f['drafted_per_round']:.2f}"]
            wanted = f"{'median' if r['kind'] == 'defeated' else 'interval'} {r['least']}"
            rows.append([f"{r['case']}, {f['drafter']}", *cells, wanted, "yes" if f["held"] else "NO"])
    return Grid("Over plain decoding", ["case, drafter", "x plain", "95 %", "drafted/round", "asked for", "held"], rows)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=["eagle3", "suffix"], help="DRAFTER or DRAFTER@SIZE")
    parser.add_argument("--model", default="demo", help="the model that writes (demo)")
    parser.add_argument("--quantize", default=None, help="int8 or int4: the target's weights (as they are)")
    parser.add_argument("--questions", type=Path, default=PROMPTS, help="JSONL of questions with categories")
    parser.add_argument("--prompts", type=int, default=13, help="prompts of each case that defeats drafting (13)")
    parser.add_argument("--per-category", type=int, default=6, help="questions of each category (6)")
    parser.add_argument("--repeats", type=int, default=2, help="times that each is asked (2)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens each, at most (96)")
    parser.add_argument("--temperature", type=float, default=1.5, help="of the hot case (1.5)")
    parser.add_argument("--only", nargs="+", default=[], help="cases by name, or defeated or category")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    source = provenance(**{key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()})
    chosen = cases(args)
    loaded = paceline.load(args.model, drafter=None, quantize=args.quantize).model
    names = dict.fromkeys(name for case in chosen for name in case.drafters)
    # One of each for all cases: what a controller knows outlives a request, and a kind of text.
    writers = {PLAIN: LLM(loaded)} | {name: make(name, loaded) for name in names}
    results = [run(case, writers, args.repeats) for case in progress(chosen, "cases")]
    failed = [f"{r['case']}, {f['drafter']}" for r in results for f in r["drafters"] if not f["held"]]
    lines = ["not held: " + "; ".join(failed) if failed else "all held"]
    report([grid(results)], lines)
    write("never-slower", {"provenance": source, "cases": results}, [grid(results)], lines, args.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
