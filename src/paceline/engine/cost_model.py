"""Cost estimates from measurements that come one by one and age."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

_MEMORY = 0.98
"""Decay of a measurement per round."""
_MAX_WEIGHT = 8.0
"""The most measurements that a mean remembers: a machine's speed drifts."""
_LEAST_SECONDS = 1e-9
"""Shortest time that counts: a coarse clock may read the same twice, and costs are divided by one another."""
_OUTLIER = 1.5
"""Measurements are clipped to this multiple of the mean: other programs run on the machine, too."""


class Fading:
    """A mean of measurements that favours recent ones."""

    __slots__ = ("_clip", "_round", "_warm", "_weight", "value")

    def __init__(self, value: float | None = None) -> None:
        """`value`: a first guess that counts as one measurement, of a quantity that may jump: nothing is clipped.
        Without one, the first measurement (warm-up) is left out and outliers are clipped."""
        self.value = value or 0.0
        self._warm = value is not None
        self._clip = inf if self._warm else _OUTLIER
        self._weight, self._round = float(self._warm), 0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def add(self, measured: float, round: int) -> None:
        """Add a measurement. `round`: a growing number by which measurements age."""
        if not self._warm:
            self._warm = True
            return
        if self._weight == 1 and measured < self.value:
            # The only one so far may be an outlier.
            self._weight = 0.0
        elif self._weight > 0:
            measured = min(measured, self._clip * self.value)
        weight = self._weight * _MEMORY ** (round - self._round)
        self.value += (measured - self.value) / (weight + 1)
        self._weight, self._round = min(weight + 1, _MAX_WEIGHT), round


class Curve:
    """Seconds by size, interpolated and non-decreasing.

    A size that was measured once, as an outlier, may never be tried again; so it is taken to cost no more than larger
    ones.
    """

    def __init__(self, slope: float) -> None:
        """`slope`: relative cost of one more, until two sizes are measured."""
        self._slope = slope
        self._seen: dict[int, Fading] = {}
        self._points: tuple[list[int], list[float]] = [], []
        """Sizes and their seconds. One attribute, so that an interrupt cannot leave more of one than of the other."""

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points[0])

    def add(self, size: int, seconds: float, round: int) -> None:
        """Add a measurement; large sizes are rounded and share theirs."""
        step = 1 << max(0, size.bit_length() - 4)
        size = -(-size // step) * step
        seen = self._seen.setdefault(size, Fading())
        seen.add(max(seconds, _LEAST_SECONDS), round)
        sizes = self._points[0]
        if seen.known and size not in sizes:
            sizes = sorted([*sizes, size])
        falling = accumulate((self._seen[n].value for n in reversed(sizes)), min)
        self._points = sizes, [*falling][::-1]

    def at(self, size: float) -> float:
        """Return seconds, or relative costs until something is measured."""
        sizes, seconds = self._points
        if not sizes:
            return 1.0 + self._slope * size
        after = bisect_left(sizes, size)
        if after in (0, len(sizes)):
            near = min(after, len(sizes) - 1)
            return seconds[near] * (1 + self._slope * size) / (1 + self._slope * sizes[near])
        low, high = sizes[after - 1 : after + 1]
        first, last = seconds[after - 1 : after + 1]
        return first + (last - first) * (size - low) / (high - low)
