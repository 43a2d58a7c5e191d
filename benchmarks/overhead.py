"""Measure the overhead of a round outside its forward passes, with a target so small that little else remains.

After every `Engine.step`, only its forward passes (of target and draft model, with the same rows and cache lengths) are
repeated on a second cache. Changes in the machine's speed then affect both. The difference is the time of drafting,
packing, sampling, the acceptance rule, stop conditions, commit, observe and emit. The goal is at most 0.5 ms.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, bootstrap, median, progress, provenance, report, write

from paceline import DraftBudget, Drafter, Sampling
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache, Target
from paceline.testing import TINY, Oracle, random_tensors, run
from paceline.testing.tiny import start
from paceline.types import Forward, Rows, Want
from paceline.verify.tree import pack_prefix

ALLOWED_MS = 0.5
TREE = DraftBudget(nodes=12, depth=6, branch=3)


class RecordingTarget:
    """A target that records its passes and can repeat them on a second cache."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._second = target.new_cache()
        self._second.acquire()
        self._passes: list[tuple[Rows, Want]] = []
        self.vocab_size, self.context_length, self.device = target.vocab_size, target.context_length, target.device

    def new_cache(self) -> KVCache:
        return self._target.new_cache()

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        self._passes.append((rows, want))
        return self._target.forward(rows, cache, want)

    def repeat(self) -> tuple[float, int]:
        """Repeat the passes since the last call. Return (seconds, number of passes)."""
        passes, self._passes, seconds = self._passes, [], 0.0
        for rows, want in passes:
            self._reach(rows.lengths[0])
            began = time.perf_counter()
            self._target.forward(rows, self._second, want)
            seconds += time.perf_counter() - began
        return seconds, len(passes)

    def restart(self) -> None:
        """Empty the cache for the next text."""
        self._second.truncate(0, 0)

    def _reach(self, length: int) -> None:
        """Extend the second cache to `length` tokens. Their values do not affect the time of a pass."""
        missing = length - self._second.lengths[0]
        if missing > 0:
            rows = pack_prefix([0] * missing, 0, length - missing, self._target.device)
            self._second.begin(rows)
            self._second.commit(rows, [range(1, missing)])


@dataclass(frozen=True, slots=True)
class Case:
    """A drafter, created for each text from the text that the target will write. If `draft` is None, the controller
    chooses the draft size."""

    name: str
    draft: DraftBudget | None
    drafter: Callable[[RecordingTarget, list[int]], Drafter | None]


def cases() -> list[Case]:
    """Return the cases. The Oracle simulates a good drafter without cost."""

    def oracle(target: RecordingTarget, text: list[int]) -> Drafter:
        return Oracle(text, 0.8, target.vocab_size)

    return [
        Case("none", DraftBudget.chain(0), lambda target, text: None),
        Case("ngram chain", DraftBudget.chain(7), lambda target, text: NGram()),
        Case("suffix chain", DraftBudget.chain(7), lambda target, text: Suffix()),
        Case("suffix tree", TREE, lambda target, text: Suffix()),
        Case("oracle chain", DraftBudget.chain(7), oracle),
        Case("oracle tree", TREE, oracle),
        Case("draft model chain", DraftBudget.chain(5), lambda target, text: DraftModel(target, target.vocab_size)),
        Case("oracle, draft auto", None, oracle),
        Case("suffix+oracle, draft auto", None, lambda target, text: DrafterStack([Suffix(), oracle(target, text)])),
    ]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: milliseconds of the round (`step`) and of its forward passes (`bare`), tokens, number of passes."""

    step: float
    bare: float
    tokens: int
    passes: int


def measure(target: RecordingTarget, case: Case, sampling: Sampling, prompts: Sequence[list[int]]) -> list[Round]:
    """Measure all rounds of one text per prompt, after a warm-up text."""
    rounds: list[Round] = []
    for index, prompt in enumerate([prompts[0], *prompts]):
        known = prompt + run(target, prompt, sampling)[0]
        target.repeat()
        target.restart()
        engine = Engine(target, case.drafter(target, known), case.draft)
        found = _rounds(engine, target, prompt, sampling)
        rounds += found if index else []
    return rounds


def _rounds(engine: Engine, target: RecordingTarget, prompt: list[int], sampling: Sampling) -> list[Round]:
    request = start(engine, prompt, sampling, (), None)
    rounds = []
    try:
        engine.prefill(request)
        target.repeat()
        while request.finish is None:
            length = len(request.token_ids)
            began = time.perf_counter()
            engine.step([request])
            step = time.perf_counter() - began
            bare, passes = target.repeat()
            rounds.append(Round(step * 1e3, bare * 1e3, len(request.token_ids) - length, passes))
    finally:
        engine.finish(request)
    return rounds


def summarise(rounds: Sequence[Round]) -> dict[str, float]:
    """Return medians over rounds. The excess is the median difference, with a bootstrap interval."""
    excess = [r.step - r.bare for r in rounds]
    low, high = bootstrap(excess, draws=500)
    return {
        "rounds": len(rounds),
        "tokens_per_round": sum(r.tokens for r in rounds) / len(rounds),
        "passes_per_round": sum(r.passes for r in rounds) / len(rounds),
        "step_ms": median(r.step for r in rounds),
        "bare_ms": median(r.bare for r in rounds),
        "excess_ms": median(excess),
        "excess_low_ms": low,
        "excess_high_ms": high,
    }


def grid(results: Sequence[dict[str, Any]]) -> Grid:
    rows = [
        [
            f"{r['vocab']}, {r['sampling']}, {r['drafter']}",
            *[f"{r[key]:.2f}" for key in ("tokens_per_round", "passes_per_round", "step_ms", "bare_ms")],
            f"{r['excess_ms']:.3f} [{r['excess_low_ms']:.3f}, {r['excess_high_ms']:.3f}]",
            "yes" if r["excess_ms"] <= ALLOWED_MS else "NO",
        ]
        for r in results
    ]
    columns = ["vocabulary, sampling, drafter", "tokens/round", "passes/round", "round ms", "passes ms"]
    return Grid(
        "Overhead of a round above its forward passes", [*columns, "excess ms", f"within {ALLOWED_MS} ms"], rows
    )


def make_target(vocab: int, context: int, scale: float) -> Target:
    """Return a target with two random float32 layers.

    At `scale` 0.7, the nucleus of T=0.7, top_p=.9 has about 25 tokens, as with the demo model. At 0.4 it has over 1,000
    tokens, which takes the slow path of top-p.
    """
    config = replace(TINY, vocab_size=vocab, context_length=context)
    return Decoder(config, random_tensors(config, scale=scale), torch.float32, torch.device("cpu"))


def make_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Return random prompts that repeat their first half, so that lookup drafters find matches."""
    generator = torch.Generator().manual_seed(1)
    halves = torch.randint(1, vocab, (count, length // 2), generator=generator).tolist()
    return [half + half for half in halves]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 49152], help="vocabulary sizes (32000 49152)")
    parser.add_argument("--texts", type=int, default=6, help="texts per case (6)")
    parser.add_argument("--length", type=int, default=200, help="tokens per prompt (200)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per text (96)")
    parser.add_argument(
        "--scale",
        type=float,
        default=0.7,
        help="scale of the random weights, which determines how peaked the logits are (0.7)",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def samplings(tokens: int) -> dict[str, Sampling]:
    return {
        "greedy": Sampling(max_new_tokens=tokens),
        "T=0.7 top_p=.9": Sampling(max_new_tokens=tokens, temperature=0.7, top_p=0.9, seed=3),
    }


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    torch.set_num_threads(args.threads)
    source = provenance(**vars(args), cases=[{"name": c.name, "draft": c.draft and asdict(c.draft)} for c in cases()])
    plan = [(v, name, case) for v in args.vocab for name in samplings(1) for case in cases()]
    results, raw = [], []
    for vocab, name, case in progress(plan, "rounds"):
        target = RecordingTarget(make_target(vocab, args.length + args.tokens + 64, args.scale))
        prompts = make_prompts(args.texts, args.length, vocab)
        rounds = measure(target, case, samplings(args.tokens)[name], prompts)
        results.append({"vocab": vocab, "sampling": name, "drafter": case.name, **summarise(rounds)})
        raw.append([[round(r.step, 4), round(r.bare, 4)] for r in rounds])
    worst = max(results, key=lambda r: r["excess_ms"])
    lines = [f"largest excess: {worst['excess_ms']:.3f} ms ({worst['drafter']}, {worst['sampling']})"]
    report([grid(results)], lines)
    result = {"provenance": source, "results": results, "rounds_ms_step_and_bare": raw}
    write("overhead", result, [grid(results)], lines, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
