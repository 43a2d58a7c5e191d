"""Measurements of this machine: the costs of rounds, threads, memory bandwidth and the size of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median

import torch

from paceline.bench.costs import Costs, PassTimer, measure_costs
from paceline.bench.doctor.weights import weight_bytes
from paceline.checkpoints.loader import Loaded
from paceline.kernels.threads import cores

_BUFFER = 1 << 28
"""Bytes of the bandwidth test, larger than any CPU cache."""


@dataclass(frozen=True)
class Machine(Costs):
    """Measurements of a target on this machine. Times are in seconds.

    Attributes:
        bandwidth: Bytes of memory read per second.
        weights: Bytes that a pass reads, or None if unknown.
        threads: Number of threads -> time of a pass of one row.
    """

    bandwidth: float
    weights: int | None
    threads: dict[int, float]

    @property
    def min_pass_seconds(self) -> float | None:
        """Minimum time of a pass, which is the time to read the weights. None if unknown."""
        return self.weights / self.bandwidth if self.weights else None


def measure_machine(model: Loaded) -> Machine:
    """Measure everything that does not depend on a drafter."""
    target = model.target
    probe = PassTimer(target)
    costs = measure_costs(model, probe)
    most = cores()
    counts = sorted({torch.get_num_threads(), most, max(1, most // 2), 1}) if target.device.type == "cpu" else []
    threads = by_threads(probe, counts)
    known = {field.name: getattr(costs, field.name) for field in fields(Costs)}
    return Machine(**known, bandwidth=bandwidth(target.device), weights=weight_bytes(target), threads=threads)


def by_threads(probe: PassTimer, counts: Sequence[int]) -> dict[int, float]:
    """Return number of CPU threads -> time of a pass of one row in seconds. Restore the number of threads
    afterwards."""
    now = torch.get_num_threads()
    try:
        found = {}
        for count in counts:
            torch.set_num_threads(count)
            probe.verify(1)
            found[count] = median(probe.verify(1) for _ in range(7))
        return found
    finally:
        torch.set_num_threads(now)


def bandwidth(device: torch.device, timer: Callable[[], float] = time.perf_counter, size: int | None = None) -> float:
    """Return the bytes of memory read per second, from the fastest of several reads of a large buffer."""
    size = size or _BUFFER
    buffer = torch.ones(size // 4, device=device)

    def read() -> float:
        began = timer()
        float(buffer.sum())
        return timer() - began

    read()
    return size / max(min(read() for _ in range(4)), 1e-9)
