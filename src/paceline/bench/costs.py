"""Measuring the costs of a target on this machine: passes by rows and context, prefill, and the host's work per
round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch

from paceline.checkpoints.loader import Loaded
from paceline.engine.cost_model import Curve
from paceline.llm import LLM
from paceline.protocols import KVCache, Target
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, Rows, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, pack, pack_prefix

ROWS = (1, 2, 4, 8, 16, 32)
PREFIX = 200
"""Context length of timed passes, in tokens."""
_FURTHER = 3 * PREFILL_ROWS
"""Tokens to add to the context to measure how it slows down a pass."""
_ROUNDS = 24
"""Number of plain rounds to time for the host's work."""
_PROMPT = "Write the opening paragraph of a story about a lighthouse keeper who has lost track of the days."


@dataclass(frozen=True)
class Costs:
    """Costs of a target's rounds, in seconds.

    Attributes:
        passes: Rows -> time of a pass after `PREFIX` tokens.
        growth: Additional time of a pass for each additional token of context.
        prefill: Time per token of a prompt of `PREFIX` tokens.
        prefill_growth: Additional time of a prompt token for each additional token before it.
        host: Time of a round, excluding the pass and the draft.
    """

    passes: dict[int, float]
    growth: float
    prefill: float
    prefill_growth: float
    host: float

    @property
    def one_row(self) -> float:
        """Time of the smallest pass, in seconds."""
        return self.passes[min(self.passes)]

    @cached_property
    def _curve(self) -> Curve:
        curve = Curve(slope=0.03)
        for size, seconds in self.passes.items():
            for round in range(2):  # the curve ignores the first measurement of each size
                curve.add(size, seconds, round)
        return curve

    def verify(self, rows: float, before: float) -> float:
        """Return the time of a pass in seconds.

        Args:
            rows: Mean number of rows.
            before: Context length, summed over all slots.
        """
        seconds = self._curve.at(rows)
        return max(seconds / 2, seconds + self.growth * (before - PREFIX))

    def feed(self, tokens: int, before: int) -> float:
        """Return the time of a prefill chunk of `tokens` tokens after `before` tokens, in seconds."""
        small = self.verify(min(tokens, max(self.passes)), before)
        further = max(0.0, before + tokens / 2 - PREFIX / 2)
        return max(small, tokens * (self.prefill + self.prefill_growth * further))


class PassTimer:
    """Timed passes over one slot of a target."""

    def __init__(self, target: Target, timer: Callable[[], float] = time.perf_counter) -> None:
        self._target, self._timer = target, timer
        self._cache: KVCache = target.new_cache()
        self._slot = self._cache.acquire(PREFIX)

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._cache.lengths[self._slot]

    def feed(self, count: int) -> float:
        """Prefill and commit `count` tokens. Return the time in seconds."""
        tokens = [(7 * i) % min(1000, self._target.vocab_size) for i in range(count)]
        began = self._timer()
        rows = pack_prefix(tokens, self._slot, self.length, self._target.device)
        self._run(rows, Want("none"))
        seconds = self._timer() - began
        self._cache.commit(rows, [range(1, count)])
        return seconds

    def verify(self, rows: int) -> float:
        """Run a pass over a chain of `rows` rows without committing it.

        Returns:
            Time in seconds, including packing.
        """
        began, draft = self._timer(), Draft.chain(tuple(range(1, rows)))
        self._run(pack([0], [draft], [self._slot], [self.length], self._target.device), Want("all"))
        return self._timer() - began

    def _run(self, rows: Rows, want: Want) -> None:
        out = self._target.forward(rows, self._cache, want)
        if out.logits.numel():
            float(out.logits[0, 0, 0])  # waits for the device
        elif self._target.device.type == "cuda":
            torch.cuda.synchronize()


def measure_costs(model: Loaded, probe: PassTimer | None = None, most: int = max(ROWS)) -> Costs:
    """Measure the costs of rounds.

    Args:
        model: The model.
        probe: Timer to use. By default, create a new one.
        most: Maximum number of rows.
    """
    probe = probe or PassTimer(model.target)
    context = model.target.context_length
    prefix = min(PREFIX, context // 2)
    prefill = median(PassTimer(model.target).feed(prefix) for _ in range(3)) / prefix
    probe.feed(prefix)
    sizes = [n for n in (*ROWS, 64, 128, 256) if n <= max(most, max(ROWS)) and probe.length + n < context]
    seconds = passes(probe, sizes)
    later, growth = lengthen(probe, context)
    # Difference between the mean context of a token in the additional chunks and of a token in the prefix.
    further = (probe.length + prefix) / 2 - prefix / 2
    return Costs(seconds, growth, prefill, max(0.0, later - prefill) / further, _host(model))


def passes(probe: PassTimer, rows: Sequence[int] = ROWS, repeats: int = 9) -> dict[int, float]:
    """Return rows -> median time of a pass in seconds. Sizes are interleaved, after a warm-up pass of each size."""
    for n in rows:
        probe.verify(n)
    turns = [[probe.verify(n) for n in rows] for _ in range(repeats)]
    return {n: median(times) for n, times in zip(rows, zip(*turns, strict=True), strict=True)}


def lengthen(probe: PassTimer, context: int) -> tuple[float, float]:
    """Lengthen the context of `probe` and measure its effect.

    Returns:
        Seconds per prompt token, and additional seconds of a pass for each additional token of context.
    """
    before = _median(lambda: probe.verify(MIN_ROWS))
    room = (context - probe.length - MIN_ROWS) // PREFILL_ROWS
    chunks = [PREFILL_ROWS] * min(_FURTHER // PREFILL_ROWS, max(1, room))
    seconds = [probe.feed(n) for n in chunks]
    after = _median(lambda: probe.verify(MIN_ROWS))
    return median(seconds) / PREFILL_ROWS, max(0.0, after - before) / sum(chunks)


def _host(model: Loaded) -> float:
    """Return the time of a plain round, excluding the pass, in seconds. The fastest of three replies is used."""
    llm = LLM(model)
    prompt, rounds = llm.prompt_ids(_PROMPT), []
    for _ in range(3):
        stats = llm.generate(prompt, Sampling(max_new_tokens=_ROUNDS, ignore_eos=True)).stats
        rounds.append(sum(stats.seconds[phase] for phase in ("draft", "commit", "other")) / max(1, stats.rounds))
    return min(rounds)


def _median(measure: Callable[[], float], times: int = 7) -> float:
    return median(measure() for _ in range(times))
