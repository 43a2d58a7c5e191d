"""What learned drafters give on the demo model: tokens per round and speed, by drafter, category and way to sample.

Every system answers the same Spec-Bench questions (their first turns), interleaved, batch 1, beside plain decoding. The
drafters were trained on none of these questions. Tokens per round count the target's own token; a category's figure is
all its tokens by all its rounds, and the mean over categories weighs them alike. Token counts do not depend on the
machine's load, speeds do: compare them within a question only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import RESULTS, Grid, bootstrap, load_prompts, median, pick, provenance, report, write
from model_free import Reply, Sample, Write, measure, ratios, total_speed

import paceline
from paceline import LLM, Sampling, Tree
from paceline.drafters.make import make_drafter
from paceline.models.loader import Loaded, load_model

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class System:
    """A drafter by name, how much it drafts, and how text is chosen."""

    name: str
    drafter: str | None
    draft: Tree | None
    sampling: Sampling
    over: str = PLAIN
    """The system that decodes the same way without drafts."""


def systems(args: argparse.Namespace) -> list[System]:
    """All that is measured. `--eagle3` and `--medusa` may name folders instead of what comes with Paceline."""
    eagle3, medusa = (f"{kind}:{path}" if (path := getattr(args, kind)) else kind for kind in ("eagle3", "medusa"))
    drafting = {
        "eagle3 chain 5": (eagle3, Tree.chain(5)),
        "eagle3 chain 3": (eagle3, Tree.chain(3)),
        "eagle3 tree 24": (eagle3, Tree(24, 6, 4)),
        "eagle3": (eagle3, None),
        "medusa tree 24": (medusa, Tree(24, 4, 8)),
        "medusa": (medusa, None),
        "suffix": ("suffix", None),
        "auto": ("auto", None),
    }
    for given in args.also:
        name, _, spec = given.partition("=")
        drafting[name] = (spec, None)
    greedy = Sampling(max_new_tokens=args.tokens)
    found = [System(PLAIN, None, None, greedy)]
    found += [System(name, spec, draft, greedy) for name, (spec, draft) in drafting.items()]
    warm = Sampling(max_new_tokens=args.tokens, temperature=0.7, seed=1)
    found.append(System("T=0.7 plain", None, None, warm))
    for name in ("eagle3 chain 5", "eagle3 tree 24", "medusa tree 24"):
        spec, draft = drafting[name]
        for rule in ("match", "rejection", "block"):
            sampling = replace(warm, rule=rule)
            found.append(System(f"T=0.7 {name} {rule}", spec, draft, sampling, "T=0.7 plain"))
    kept = [s for s in found if s.drafter and (not args.only or any(word in s.name for word in args.only))]
    names = {s.name for s in kept} | {s.over for s in kept}
    return [s for s in found if s.name in names]


def writer(system: System, loaded: Loaded) -> Write:
    llm = LLM(loaded, make_drafter(system.drafter, loaded, load_model), system.draft)

    def write_reply(text: str) -> Reply:
        done = llm.generate(text, system.sampling)
        return Reply(done.token_ids, done.stats)

    return write_reply


def tokens_per_round(samples: Sequence[Sample]) -> float:
    stats = [s.reply.stats for s in samples if s.reply.stats]
    return sum(s.tokens for s in stats) / max(1, sum(s.rounds for s in stats))


def by_category(samples: Sequence[Sample], figure: Callable[[Sequence[Sample]], float]) -> dict[str, float]:
    categories = dict.fromkeys(s.prompt.category for s in samples)
    return {c: figure([s for s in samples if s.prompt.category == c]) for c in categories}


def accepted_at(samples: Sequence[Sample], depth: int = 6) -> list[float]:
    """The share of rounds that kept a draft to depth 1, 2, ... at least."""
    stats = [s.reply.stats for s in samples if s.reply.stats]
    rounds = sum(s.rounds for s in stats)
    return [sum(s.accepted_at[d] for s in stats if d < len(s.accepted_at)) / max(1, rounds) for d in range(depth)]


def summarise(system: System, samples: Sequence[Sample]) -> dict[str, Any]:
    own = [s for s in samples if s.system == system.name]
    stats = [s.reply.stats for s in own if s.reply.stats]
    rounds = sum(s.rounds for s in stats)
    per_round = by_category(own, tokens_per_round)
    over = ratios(samples, system.name, system.over)
    speeds = {
        c: median(ratios([s for s in samples if s.prompt.category == c], system.name, system.over)) for c in per_round
    }
    low, high = bootstrap(over)
    return {
        "system": system.name,
        "drafter": system.drafter,
        "mean_tokens_per_round": fmean(per_round.values()),
        "tokens_per_round": per_round,
        "accepted_at": accepted_at(own),
        "draft_ms": sum(s.seconds["draft"] for s in stats) / max(1, rounds) * 1e3,
        "round_ms": sum(sum(s.seconds.values()) - s.seconds["prefill"] for s in stats) / max(1, rounds) * 1e3,
        "tokens_per_second": total_speed(own),
        "speedup": {"median": median(over), "low": low, "high": high, "by_category": speeds},
        "worst": min(per_round, key=lambda c: per_round[c]),
        "slowest": min(speeds, key=lambda c: speeds[c]),
    }


def main_grid(summaries: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    for s in summaries:
        ratio = s["speedup"]
        rows.append(
            [
                s["system"],
                f"{s['mean_tokens_per_round']:.2f}",
                f"{s['worst']} {s['tokens_per_round'][s['worst']]:.2f}",
                " ".join(f"{share:.2f}"[1:] if share < 1 else "1" for share in s["accepted_at"]),
                f"{s['draft_ms']:.1f}",
                f"{s['round_ms']:.1f}",
                f"{s['tokens_per_second']:.1f}",
                f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                f"{s['slowest']} {ratio['by_category'][s['slowest']]:.2f}",
            ]
        )
    columns = ["system", "tokens/round", "worst category", "kept to depth 1, 2, ...", "draft ms/round", "ms/round"]
    return Grid("By drafter", [*columns, "tok/s", "x plain", "slowest category"], rows)


def category_grid(title: str, summaries: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], Any]) -> Grid:
    categories = list(summaries[0]["tokens_per_round"])
    rows = [[s["system"], *[f"{figure(s)[c]:.2f}" for c in categories]] for s in summaries]
    return Grid(title, ["system", *categories], rows)


def equal_texts(found: Sequence[System], samples: Sequence[Sample]) -> list[str]:
    """Whether every system that promises plain decoding's text wrote it."""
    text = {(s.system, s.prompt.id, s.repeat): s.reply.token_ids for s in samples}
    lines = []
    for system in found:
        if system.drafter is None or system.sampling.rule != "match":
            continue
        own = [key for key in text if key[0] == system.name]
        same = sum(text[key] == text[(system.over, *key[1:])] for key in own)
        lines.append(f"{system.name}: {same} of {len(own)} texts are those of {system.over}")
    return lines


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=26, help="questions, evenly over the 13 categories (26)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens each, at most (96)")
    parser.add_argument("--repeats", type=int, default=1, help="times that every question is asked (1)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--eagle3", help="folder of an EAGLE-3 head; without it, the one that comes with Paceline")
    parser.add_argument("--medusa", help="folder of Medusa heads; without it, those that come with Paceline")
    parser.add_argument("--target", default="demo", help="the model that writes (demo)")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=DRAFTER", help="further drafters, greedy")
    parser.add_argument("--only", nargs="*", help="systems with one of these words in their name, and plain ones")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    prompts = pick(load_prompts(), args.prompts)
    source = provenance(**{key: str(value) if key == "out" else value for key, value in vars(args).items()})
    loaded = paceline.load(args.target, drafter=None).model
    found = systems(args)
    samples = measure({s.name: writer(s, loaded) for s in found}, prompts, args.repeats)
    summaries = [summarise(s, samples) for s in found]
    grids = [
        main_grid(summaries),
        category_grid("Tokens per round", summaries, lambda s: s["tokens_per_round"]),
        category_grid(
            "Speed over plain decoding, median of questions", summaries, lambda s: s["speedup"]["by_category"]
        ),
    ]
    lines = equal_texts(found, samples)
    report(grids, lines)
    result = {"provenance": source, "summary": summaries, "claims": lines}
    write("learned", result | {"samples": [s.as_dict() for s in samples]}, grids, lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
