"""Cost estimates from a stream of measurements. Older measurements have less weight."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

_DECAY = 0.98
"""Factor by which the weight of a measurement shrinks in each round."""
_MAX_WEIGHT = 8.0
"""Maximum weight of the past in a mean, in measurements. It is low, so that the mean follows a machine's drifting
speed."""
_MIN_SECONDS = 1e-9
"""Lower bound for measured times. A coarse clock may measure 0, and some of these times are divided by."""
_OUTLIER = 1.5
"""Measurements are clipped to this multiple of the mean, because other programs may slow the machine down for a
moment."""


class FadingMean:
    """A mean of measurements that gives recent ones more weight."""

    __slots__ = ("_clip", "_round", "_warm", "_weight", "value")

    def __init__(self, value: float | None = None) -> None:
        """Make a mean.

        Args:
            value: A first guess, which counts as one measurement. With a guess, outliers are not clipped, so the mean
                follows a quantity that jumps. Without a guess, outliers are clipped, and the first measurement
                (warm-up) is only an upper limit for the second, which may be an outlier too.
        """
        self.value = value or 0.0
        self._warm = value is not None
        self._clip = inf if self._warm else _OUTLIER
        self._weight, self._round = float(self._warm), 0

    @property
    def known(self) -> bool:
        """True if there is a value."""
        return self._weight > 0

    def add(self, measured: float, round: int) -> None:
        """Add a measurement made in round `round`. Measurements of earlier rounds then count less."""
        if not self._warm:
            self._warm, self.value = True, measured
            return
        if self._weight == 1 and measured < self.value:
            # Replace the only measurement so far, which may be an outlier.
            self._weight = 0.0
        elif self._weight > 0:
            measured = min(measured, self._clip * self.value)
        else:
            measured = min(measured, self.value)
        weight = self._weight * _DECAY ** (round - self._round)
        self.value += (measured - self.value) / (weight + 1)
        self._weight, self._round = min(weight + 1, _MAX_WEIGHT), round


class Curve:
    """Seconds as a non-decreasing function of size, interpolated between measurements.

    The curve never lets a size cost more than a larger size. Otherwise, one outlier could make a size look so expensive
    that it is never tried again.
    """

    def __init__(self, slope: float) -> None:
        """Make a curve. `slope`: Relative cost of each increment of the size, for sizes outside the measured range."""
        self._slope = slope
        self._seen: dict[int, FadingMean] = {}
        self._points: tuple[list[int], list[float]] = [], []
        """Sizes and their seconds. They are one attribute, so that an interrupt cannot leave lists of unequal
        length."""

    @property
    def known(self) -> bool:
        """True if at least one size has been measured."""
        return bool(self._points[0])

    def measured(self, size: int) -> bool:
        """Return True if a size has been measured."""
        return _rounded(size) in self._points[0]

    def add(self, size: int, seconds: float, round: int) -> None:
        """Add a measurement. Large sizes are rounded, so that similar sizes share their measurements."""
        size = _rounded(size)
        seen = self._seen.setdefault(size, FadingMean())
        seen.add(max(seconds, _MIN_SECONDS), round)
        sizes = self._points[0]
        if seen.known and size not in sizes:
            sizes = sorted([*sizes, size])
        falling = accumulate((self._seen[n].value for n in reversed(sizes)), min)
        self._points = sizes, [*falling][::-1]

    def at(self, size: float) -> float:
        """Return the expected seconds for a size. Before any measurement, return its cost relative to size 0."""
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


def _rounded(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
