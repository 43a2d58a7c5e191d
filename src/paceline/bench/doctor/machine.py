"""What this machine takes for a pass, for a prompt, and for reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import FunctionType

import torch
from torch import Tensor

from paceline.engine.cost_model import Curve
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache, Target
from paceline.types import Draft, Rows, Tap, Want
from paceline.verify.tree import MIN_ROWS, PREFILL_ROWS, pack, pack_prefix

Clock = Callable[[], float]

ROWS = (1, 2, 4, 8, 16, 32)
PREFIX = 200
"""Tokens before the rows whose pass is timed."""
_FURTHER = 3 * PREFILL_ROWS
"""So many more, to see how a pass grows with the text."""
_BUFFER = 1 << 28
"""Bytes: more than any cache holds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds throughout. `passes`: of a pass of so many rows after `PREFIX` tokens. `growth`: what a token more before
    them adds. `prefill`: of a prompt's token. `host`: of a round beside its pass and its draft. `bandwidth`: bytes of
    memory read in a second, `weights`: bytes that a pass must read; None where it is not known. `threads`: pass of one
    row by number of threads."""

    passes: dict[int, float]
    growth: float
    prefill: float
    host: float
    bandwidth: float
    weights: int | None
    threads: dict[int, float]

    @property
    def floor(self) -> float | None:
        """What a pass would take if reading weights were all."""
        return self.weights / self.bandwidth if self.weights else None

    def verify(self, rows: float, before: float) -> float:
        """Of a pass of so many rows (a mean, of many rounds) after so many tokens."""
        curve = Curve(slope=0.03)
        for size, seconds in self.passes.items():
            for round in range(2):  # the first of each would be left out
                curve.add(size, seconds, round)
        return curve.at(rows) + self.growth * max(0.0, before - PREFIX)


class PassTimer:
    """One slot of a target, and passes over it that are timed."""

    def __init__(self, target: Target, taps: Sequence[Tap] = (), clock: Clock = time.perf_counter) -> None:
        self._target, self._taps, self._clock = target, tuple(taps), clock
        self._cache: KVCache = target.new_cache()
        self._slot = self._cache.acquire(PREFIX)

    @property
    def length(self) -> int:
        return self._cache.lengths[self._slot]

    def feed(self, count: int) -> float:
        """A chunk of a prompt: seconds."""
        tokens = [(7 * i) % min(1000, self._target.vocab_size) for i in range(count)]
        rows = pack_prefix(tokens, self._slot, self.length, self._target.device)
        seconds = self._time(rows, "none")
        self._cache.commit(rows, [range(1, count)])
        return seconds

    def verify(self, rows: int) -> float:
        """A pass over a chain of so many rows: seconds. Nothing is committed."""
        draft = Draft.chain(tuple(range(1, rows)))
        return self._time(pack([0], [draft], [self._slot], [self.length], self._target.device), "all")

    def _time(self, rows: Rows, logits: str) -> float:
        began = self._clock()
        out = self._target.forward(rows, self._cache, Want(logits, taps=self._taps))  # type: ignore[arg-type]
        if out.logits.numel():
            float(out.logits[0, 0, 0])  # a device has finished by then
        elif self._target.device.type == "cuda":
            torch.cuda.synchronize()
        return self._clock() - began


def passes(probe: PassTimer, rows: Sequence[int] = ROWS, repeats: int = 9) -> dict[int, float]:
    """Medians of passes by rows, interleaved, after one of each that warms up."""
    seen: dict[int, list[float]] = {n: [] for n in rows}
    for turn in range(repeats + 1):
        for n in rows:
            seconds = probe.verify(n)
            if turn:
                seen[n].append(seconds)
    return {n: median(values) for n, values in seen.items()}


def lengthen(probe: PassTimer, context: int) -> tuple[float, float]:
    """(seconds of a prompt's token, what a token more before it adds to a pass), by going on with a prompt."""
    start, before = probe.length, _median(lambda: probe.verify(MIN_ROWS))
    chunks = [PREFILL_ROWS] * min(_FURTHER // PREFILL_ROWS, max(1, (context - start - MIN_ROWS) // PREFILL_ROWS))
    seconds = [probe.feed(n) for n in chunks]
    after = _median(lambda: probe.verify(MIN_ROWS))
    return median(seconds) / PREFILL_ROWS, max(0.0, after - before) / sum(chunks)


def by_threads(probe: PassTimer, counts: Sequence[int]) -> dict[int, float]:
    """Seconds of a small pass by number of CPU threads; the number stays as it was."""
    own = torch.get_num_threads()
    try:
        found = {}
        for count in counts:
            torch.set_num_threads(count)
            probe.verify(1)
            found[count] = _median(lambda: probe.verify(1))
        return found
    finally:
        torch.set_num_threads(own)


def bandwidth(device: torch.device, clock: Clock = time.perf_counter, size: int = _BUFFER) -> float:
    """Bytes read in a second, from a buffer that no cache holds: the best of a few tries."""
    buffer = torch.ones(size // 4, device=device)

    def read() -> float:
        began = clock()
        float(buffer.sum())
        return clock() - began

    read()
    return size / max(min(read() for _ in range(4)), 1e-9)


def weight_bytes(target: Target) -> int | None:
    """Bytes of weights that a small pass reads: all that the native decoder holds, but not the table of embeddings
    where the head has weights of its own. None for other targets, and for experts, of which a pass reads some."""
    if not isinstance(target, Decoder) or any(layer.sparse for layer in target.config.plan):
        return None
    tensors = _tensors(target)
    table = target.config.vocab_size * target.config.hidden
    coded = sum(t.nbytes for t in tensors if t.dtype == torch.uint8)
    tables = [t for t in tensors if t.numel() == table and t.is_floating_point()]
    spare = tables[:1] if len(tables) > 1 or coded else []
    return sum(t.numel() * t.element_size() for t in tensors) - sum(t.numel() * t.element_size() for t in spare)


def _tensors(root: object) -> list[Tensor]:
    """Every tensor that an object of Paceline's holds, once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    open_: list[object] = [root]
    while open_:
        thing = open_.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[id(thing) if thing.is_mkldnn else thing.data_ptr()] = thing
        elif isinstance(thing, dict):
            open_ += thing.values()
        elif isinstance(thing, (list, tuple)):
            open_ += thing
        elif isinstance(thing, FunctionType):
            open_ += [cell.cell_contents for cell in thing.__closure__ or ()]
        elif type(thing).__module__.startswith("paceline"):
            open_ += _held(thing)
    return list(found.values())


def _held(thing: object) -> list[object]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*vars(thing).values()] if not slots else [getattr(thing, name, None) for name in slots]


def _median(measure: Callable[[], float], times: int = 7) -> float:
    return median(measure() for _ in range(times))
