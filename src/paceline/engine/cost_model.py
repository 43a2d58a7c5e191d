"""What things take on this machine, by measurements that come one by one and age."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate
from math import inf

_MEMORY = 0.98
"""What a measurement still weighs a round later."""
_MOST = 8.0
"""Measurements that a mean weighs at most: a machine's speed drifts."""
_ODD = 1.5
"""So many times the mean and no more is believed: other programs run on this machine, too."""


class Fading:
    """A mean of measurements, the recent ones first and foremost."""

    __slots__ = ("_odd", "_round", "_warm", "_weight", "value")

    def __init__(self, value: float | None = None) -> None:
        """`value`: a first guess, which counts as one measurement, of something that may well jump. Without one, the
        first measurement is left out, because a machine warms up, and so is most of what stands out."""
        self.value = value or 0.0
        self._warm = value is not None
        self._odd = inf if self._warm else _ODD
        self._weight, self._round = float(self._warm), 0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def add(self, measured: float, round: int) -> None:
        """`round`: a number that grows, by which measurements age."""
        if not self._warm:
            self._warm = True
            return
        if self._weight == 1 and measured < self.value:
            # The only one so far may have been taken in a bad moment.
            self._weight = 0.0
        elif self._weight > 0:
            measured = min(measured, self._odd * self.value)
        weight = self._weight * _MEMORY ** (round - self._round)
        self.value += (measured - self.value) / (weight + 1)
        self._weight, self._round = min(weight + 1, _MOST), round


class Curve:
    """Seconds by size, which only grow with it: those seen, and lines between them.

    What was measured once, in a bad moment, may never be tried again; so a size is taken to cost no more than the
    larger ones do.
    """

    def __init__(self, slope: float) -> None:
        """`slope`: what one more costs of what nothing costs, where too few sizes were seen to tell."""
        self._slope = slope
        self._seen: dict[int, Fading] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._sizes)

    def add(self, size: int, seconds: float, round: int) -> None:
        """Large sizes are taken together with those of nearly their size."""
        step = 1 << max(0, size.bit_length() - 4)
        size = -(-size // step) * step
        seen = self._seen.setdefault(size, Fading())
        seen.add(seconds, round)
        if seen.known and size not in self._sizes:
            insort(self._sizes, size)
        falling = accumulate((self._seen[n].value for n in reversed(self._sizes)), min)
        self._seconds = [*falling][::-1]

    def at(self, size: float) -> float:
        """Seconds; relative ones as long as nothing was seen."""
        if not self._sizes:
            return 1.0 + self._slope * size
        after = bisect_left(self._sizes, size)
        if after in (0, len(self._sizes)):
            near = min(after, len(self._sizes) - 1)
            return self._seconds[near] * (1 + self._slope * size) / (1 + self._slope * self._sizes[near])
        low, high = self._sizes[after - 1 : after + 1]
        first, last = self._seconds[after - 1 : after + 1]
        return first + (last - first) * (size - low) / (high - low)
