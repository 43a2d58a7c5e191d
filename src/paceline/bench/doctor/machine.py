"""Timings of this machine: passes, prefill, host work of a round, memory bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from paceline.bench.doctor.acceptance import PROMPTS
from paceline.bench.doctor.weights import weight_bytes
from paceline.checkpoints.loader import Loaded
from paceline.engine.cost_model import Curve
from paceline.llm import LLM
from paceline.protocols import KVCache, Target
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, Rows, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, pack, pack_prefix

ROWS = (1, 2, 4, 8, 16, 32)
PREFIX = 200
"""Tokens before the rows of a timed pass."""
_FURTHER = 3 * PREFILL_ROWS
"""Tokens added to the prefix to see how a pass slows down with the context."""
_BUFFER = 1 << 28
"""Bytes of the bandwidth test, more than any CPU cache holds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements of a target on this machine, times in seconds.

    `passes`: of a pass by its rows, after `PREFIX` tokens. `growth`: added to a pass by each further token before it.
    `prefill`: per prompt token. `host`: of a round without its pass and draft. `bandwidth`: bytes of memory read per
    second. `weights`: bytes that a pass reads, None if unknown. `threads`: of a one-row pass by number of threads.
    """

    passes: dict[int, float]
    growth: float
    prefill: float
    host: float
    bandwidth: float
    weights: int | None
    threads: dict[int, float]

    @property
    def one_row(self) -> float:
        """Time of the smallest pass."""
        return self.passes[min(self.passes)]

    @property
    def floor(self) -> float | None:
        """Time of a pass if reading the weights were all its work."""
        return self.weights / self.bandwidth if self.weights else None

    def verify(self, rows: float, before: float) -> float:
        """Return the time of a pass of `rows` (a mean over rounds) after `before` tokens."""
        curve = Curve(slope=0.03)
        for size, seconds in self.passes.items():
            for round in range(2):  # the curve ignores the first of each size
                curve.add(size, seconds, round)
        return curve.at(rows) + self.growth * max(0.0, before - PREFIX)


class PassTimer:
    """One slot of a target, and timed passes over it."""

    def __init__(self, target: Target, timer: Callable[[], float] = time.perf_counter) -> None:
        self._target, self._timer = target, timer
        self._cache: KVCache = target.new_cache()
        self._slot = self._cache.acquire(PREFIX)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.lengths[self._slot]

    def feed(self, count: int) -> float:
        """Prefill and commit `count` tokens; return the seconds."""
        tokens = [(7 * i) % min(1000, self._target.vocab_size) for i in range(count)]
        rows = pack_prefix(tokens, self._slot, self.length, self._target.device)
        seconds = self._time(rows, Want("none"))
        self._cache.commit(rows, [range(1, count)])
        return seconds

    def verify(self, rows: int) -> float:
        """Run a pass over a chain of `rows` without committing it; return the seconds."""
        draft = Draft.chain(tuple(range(1, rows)))
        return self._time(pack([0], [draft], [self._slot], [self.length], self._target.device), Want("all"))

    def _time(self, rows: Rows, want: Want) -> float:
        began = self._timer()
        out = self._target.forward(rows, self._cache, want)
        if out.logits.numel():
            float(out.logits[0, 0, 0])  # waits for the device
        elif self._target.device.type == "cuda":
            torch.cuda.synchronize()
        return self._timer() - began


def measure_machine(model: Loaded) -> Machine:
    """Time everything that does not depend on a drafter."""
    target = model.target
    probe = PassTimer(target)
    if prefix := min(PREFIX, target.context_length // 2):
        probe.feed(prefix)
    seconds = passes(probe, [n for n in ROWS if probe.length + n < target.context_length])
    cores = os.cpu_count() or 1
    counts = sorted({torch.get_num_threads(), cores, max(1, cores // 2), 1}) if target.device.type == "cpu" else []
    threads = by_threads(probe, counts)
    prefill, growth = lengthen(probe, target.context_length)
    host = _host(model, seconds[1])
    return Machine(seconds, growth, prefill, host, bandwidth(target.device), weight_bytes(target), threads)


def passes(probe: PassTimer, rows: Sequence[int] = ROWS, repeats: int = 9) -> dict[int, float]:
    """Return the median time of a pass by its rows, interleaved, after one warm-up each."""
    for n in rows:
        probe.verify(n)
    turns = [[probe.verify(n) for n in rows] for _ in range(repeats)]
    return {n: median(times) for n, times in zip(rows, zip(*turns, strict=True), strict=True)}


def lengthen(probe: PassTimer, context: int) -> tuple[float, float]:
    """Prefill further; return (seconds per prompt token, seconds that each further token adds to a pass)."""
    before = _median(lambda: probe.verify(MIN_ROWS))
    room = (context - probe.length - MIN_ROWS) // PREFILL_ROWS
    chunks = [PREFILL_ROWS] * min(_FURTHER // PREFILL_ROWS, max(1, room))
    seconds = [probe.feed(n) for n in chunks]
    after = _median(lambda: probe.verify(MIN_ROWS))
    return median(seconds) / PREFILL_ROWS, max(0.0, after - before) / sum(chunks)


def by_threads(probe: PassTimer, counts: Sequence[int]) -> dict[int, float]:
    """Return the time of a one-row pass by number of CPU threads; the number in use is restored."""
    now = torch.get_num_threads()
    try:
        found = {}
        for count in counts:
            torch.set_num_threads(count)
            probe.verify(1)
            found[count] = _median(lambda: probe.verify(1))
        return found
    finally:
        torch.set_num_threads(now)


def bandwidth(device: torch.device, timer: Callable[[], float] = time.perf_counter, size: int | None = None) -> float:
    """Return the bytes of memory read per second, the best of a few readings of a large buffer."""
    size = size or _BUFFER
    buffer = torch.ones(size // 4, device=device)

    def read() -> float:
        began = timer()
        float(buffer.sum())
        return timer() - began

    read()
    return size / max(min(read() for _ in range(4)), 1e-9)


def _host(model: Loaded, one_row: float) -> float:
    """Seconds of a plain round beyond its pass."""
    llm, prompt = LLM(model), next(iter(PROMPTS.values()))
    rounds = []
    for _ in range(3):
        stats = llm.generate(prompt, Sampling(max_new_tokens=24, ignore_eos=True)).stats
        rounds.append((sum(stats.seconds.values()) - stats.seconds["prefill"]) / max(1, stats.rounds))
    return max(0.0, min(rounds) - one_row)


def _median(measure: Callable[[], float], times: int = 7) -> float:
    return median(measure() for _ in range(times))
