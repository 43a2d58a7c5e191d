"""How fast, without a draft model: transformers and Paceline side by side in one interleaved run.

Every system answers the same Spec-Bench questions, greedy, bfloat16, batch 1. A measurement is the wall time from the
question's text to the reply's text: chat template, tokenising, prefill, decoding, detokenising. For each question all
systems run one after the other, in an order that rotates, after one warm-up each. The machine's speed drifts, so the
ratios within a question count, not the absolute figures; intervals are bootstraps over questions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Grid,
    Prompt,
    bootstrap,
    console,
    load_prompts,
    median,
    pick,
    progress,
    provenance,
    report,
    tree_option,
    write,
)
from peers import Transformers, model_file

import paceline
from paceline import LLM, Sampling, Stats, Tree
from paceline.drafters.make import make_drafter, to_tree
from paceline.models.loader import Loaded

THEIRS, LOOKUP, PLAIN = "transformers", "transformers lookup", "paceline plain"
BASES = (THEIRS, LOOKUP, PLAIN)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a system wrote; `stats` only of Paceline's."""

    token_ids: list[int]
    stats: Stats | None = None


Write = Callable[[str], Reply]
"""A system: from a question's text to its answer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one system. `order`: its turn among the systems of this question."""

    system: str
    prompt: Prompt
    repeat: int
    order: int
    seconds: float
    reply: Reply

    @property
    def speed(self) -> float:
        """Tokens per second, end to end."""
        return len(self.reply.token_ids) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        stats = self.reply.stats
        return {
            "system": self.system,
            "prompt": self.prompt.id,
            "category": self.prompt.category,
            "repeat": self.repeat,
            "order": self.order,
            "seconds": round(self.seconds, 5),
            "tokens": len(self.reply.token_ids),
            "stats": stats.as_dict() if stats else None,
        }


def transformers_systems(loaded: Loaded, tokens: int) -> dict[str, Write]:
    """Plain generate and prompt lookup (10 draft tokens, as in its documentation)."""
    peer = Transformers(model_file(loaded), torch.bfloat16)
    peer.eos = set(loaded.eos)

    def system(lookup: int | None) -> Write:
        def write_reply(text: str) -> Reply:
            ids = peer.generate(peer.encode(text), tokens, lookup)
            peer.tokenizer.decode(ids, skip_special_tokens=True)
            return Reply(ids)

        return write_reply

    return {THEIRS: system(None), LOOKUP: system(10)}


def paceline_systems(loaded: Loaded, tokens: int, chain: int, tree: Tree) -> dict[str, Write]:
    """No drafter, and each model-free one with a budget of its own; all share the weights."""
    sampling = Sampling(max_new_tokens=tokens)

    def system(drafter: str | None, draft: int | Tree | None) -> Write:
        llm = LLM(loaded, make_drafter(drafter, loaded, _no_model), None if draft is None else to_tree(draft))

        def write_reply(text: str) -> Reply:
            done = llm.generate(text, sampling)
            return Reply(done.token_ids, done.stats)

        return write_reply

    return {
        PLAIN: system(None, None),
        "paceline ngram": system("ngram", chain),
        "paceline suffix chain": system("suffix", chain),
        "paceline suffix tree": system("suffix", tree),
        "paceline auto": system("auto", None),
    }


def _no_model(reference: str) -> Loaded:
    raise ValueError(f"no draft model takes part here, {reference} neither")


def measure(systems: dict[str, Write], prompts: Sequence[Prompt], repeats: int) -> list[Sample]:
    """The interleaved run."""
    for write_reply in systems.values():
        write_reply(prompts[0].text)
    names = list(systems)
    samples = []
    for turn, (repeat, prompt) in enumerate(
        progress([(r, p) for r in range(repeats) for p in prompts], f"{len(systems)} systems")
    ):
        start = turn % len(names)
        for order, name in enumerate(names[start:] + names[:start]):
            began = time.perf_counter()
            reply = systems[name](prompt.text)
            seconds = time.perf_counter() - began
            samples.append(Sample(name, prompt, repeat, order, seconds, reply))
    return samples


def ratios(samples: Sequence[Sample], system: str, base: str) -> list[float]:
    """Per question, the median over repeats of a system's tok/s by a base's, measured next to each other."""
    speed = {(s.system, s.prompt.id, s.repeat): s.speed for s in samples}
    found: dict[int, list[float]] = {}
    for (name, prompt, repeat), value in speed.items():
        if name == system:
            found.setdefault(prompt, []).append(value / speed[base, prompt, repeat])
    return [median(values) for values in found.values()]


def total_speed(samples: Sequence[Sample]) -> float:
    """All tokens by all seconds."""
    seconds = sum(s.seconds for s in samples)
    return sum(len(s.reply.token_ids) for s in samples) / seconds if samples else float("nan")


def summarise(samples: Sequence[Sample], system: str) -> dict[str, Any]:
    """A system's line of the table."""
    own = [s for s in samples if s.system == system]
    return {
        "system": system,
        "tokens": sum(len(s.reply.token_ids) for s in own),
        "seconds": sum(s.seconds for s in own),
        "tokens_per_second": total_speed(own),
        "ratios": {base: _ratio(samples, system, base) for base in BASES},
        **_inside(own),
    }


def _ratio(samples: Sequence[Sample], system: str, base: str) -> dict[str, float]:
    values = ratios(samples, system, base)
    low, high = bootstrap(values)
    return {"median": median(values), "low": low, "high": high}


def _inside(own: Sequence[Sample]) -> dict[str, float | None]:
    """What Paceline's statistics add: `host_ms_per_round` is all that is neither prefill nor verify."""
    stats = [s.reply.stats for s in own if s.reply.stats]
    if not stats:
        return {"tokens_per_round": None, "acceptance": None, "decode_tokens_per_second": None, "host_ms": None}
    rounds, drafted = sum(s.rounds for s in stats), sum(s.drafted for s in stats)
    tokens, seconds = sum(s.tokens for s in stats), sum(s.seconds for s in own)
    prefill, verify = (sum(s.seconds[phase] for s in stats) for phase in ("prefill", "verify"))
    return {
        "tokens_per_round": tokens / rounds,
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "decode_tokens_per_second": tokens / (seconds - prefill),
        "host_ms": (seconds - prefill - verify) / rounds * 1e3,
    }


def same_texts(samples: Sequence[Sample], base: str) -> dict[str, int]:
    """Per system, the replies whose token ids are the base's (of the same question and repeat)."""
    reference = {(s.prompt.id, s.repeat): s.reply.token_ids for s in samples if s.system == base}
    counts = dict.fromkeys((s.system for s in samples), 0)
    for s in samples:
        counts[s.system] += s.reply.token_ids == reference[s.prompt.id, s.repeat]
    return counts


def main_grid(summaries: Sequence[dict[str, Any]], same: dict[str, int]) -> Grid:
    rows = []
    for s in summaries:
        over = [f"{r['median']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for r in s["ratios"].values()]
        inside = [_cell(s[key]) for key in ("tokens_per_round", "decode_tokens_per_second", "host_ms")]
        rows.append([s["system"], f"{s['tokens_per_second']:.1f}", *over, *inside, str(same[s["system"]])])
    columns = ["system", "tok/s", *[f"x {base}" for base in BASES], "tokens/round", "decode tok/s", "host ms/round"]
    return Grid("End to end, greedy, bfloat16, batch 1", [*columns, "texts as paceline plain"], rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def category_grid(samples: Sequence[Sample], systems: Sequence[str]) -> Grid:
    categories = dict.fromkeys(s.prompt.category for s in samples)
    rows = []
    for category in categories:
        own = [s for s in samples if s.prompt.category == category]
        count = len({s.prompt.id for s in own})
        speeds = [total_speed([s for s in own if s.system == name]) for name in systems]
        rows.append([f"{category} ({count})", *[f"{speed:.1f}" for speed in speeds]])
    return Grid("Tok/s by category (questions)", ["category", *systems], rows)


def claims(summaries: Sequence[dict[str, Any]], same: dict[str, int], replies: int) -> list[str]:
    """The lines that issue 2 asks for. The best drafter is chosen on the same data, which favours it a little."""
    by_name = {s["system"]: s for s in summaries}
    drafting = [name for name in by_name if name.startswith("paceline") and name != PLAIN]
    best = max(drafting, key=lambda name: by_name[name]["tokens_per_second"])
    differ = [name for name in drafting if same[name] != replies]
    return [
        _claim(by_name[PLAIN], by_name[THEIRS], 1.5),
        _claim(by_name[best], by_name[LOOKUP], 1.8),
        f"Paceline's texts: {'identical in all its systems' if not differ else f'NOT identical: {differ}'}",
    ]


def _claim(ours: dict[str, Any], theirs: dict[str, Any], wanted: float) -> str:
    total = ours["tokens_per_second"] / theirs["tokens_per_second"]
    ratio = ours["ratios"][theirs["system"]]
    return (
        f"{ours['system']} over {theirs['system']}: {total:.2f}x of all tokens by all seconds, median "
        f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]; wanted {wanted}x"
    )


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=26, help="questions, evenly over the 13 categories (26)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens each, at most (96)")
    parser.add_argument("--repeats", type=int, default=1, help="times that every question is asked (1)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, of every system (2)")
    parser.add_argument("--chain", type=int, default=7, help="draft length of Paceline's chains (7)")
    parser.add_argument("--tree", type=tree_option, default=Tree(15, 12, 3), help="NODES,DEPTH,BRANCH (15,12,3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    prompts = pick(load_prompts(), args.prompts)
    source = provenance(**{key: str(value) if key in ("out", "tree") else value for key, value in vars(args).items()})
    loaded = paceline.load("demo", dtype="bfloat16", device="cpu", drafter=None).model
    console.print("loading the same file with transformers (about 20 s) ...")
    systems = transformers_systems(loaded, args.tokens)
    systems |= paceline_systems(loaded, args.tokens, args.chain, args.tree)
    samples = measure(systems, prompts, args.repeats)
    summaries = [summarise(samples, name) for name in systems]
    same = same_texts(samples, PLAIN)
    lines = claims(summaries, same, len(prompts) * args.repeats)
    grids = [main_grid(summaries, same), category_grid(samples, list(systems))]
    report(grids, lines)
    result = {"provenance": source, "summary": summaries, "same_texts": same, "claims": lines}
    write("model-free", result | {"samples": [s.as_dict() for s in samples]}, grids, lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
