"""Exact and asymptotic tests, without numpy.

Every test here asks whether two samples could come from the same distribution. The first argument belongs to the
speculative side, the second to the plain side.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import NormalDist, median

Pair = tuple[Sequence[Hashable], Sequence[Hashable]]
"""Values of both sides for one prompt, the same number from each side."""

MIN_CELL_VALUES = 10
"""Cells with fewer values than this, of both sides together, are counted as one cell: chi-square needs 5 per side."""


def distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """Return the chi-square distance of two samples of equal size: 0 if their counts are equal."""
    left, right = Counter(a), Counter(b)
    return sum((left[c] - right[c]) ** 2 / (left[c] + right[c]) for c in left | right)


def exchange_test(pairs: Sequence[Pair]) -> float:
    """Test if both sides of each prompt are exchangeable: the exact distribution over all permutations within prompts.

    An endpoint whose replies vary passes if they vary in the same way on both sides.

    Returns:
        The probability of a total distance that is at least as large, if values are assigned to the sides at random.
    """
    total, observed = {0: 1.0}, 0
    for a, b in pairs:
        if len({*a, *b}) > 1:
            observed += _units(distance(a, b))
            one = _permuted(Counter([*a, *b]).values(), len(a))
            sums: dict[int, float] = defaultdict(float)
            for x, p in total.items():
                for y, q in one.items():
                    sums[x + y] += p * q
            total = sums
    return min(1.0, sum(p for x, p in total.items() if x >= observed))


def _permuted(counts: Iterable[int], size: int) -> dict[int, float]:
    """Return distance -> probability if `size` of the values, at random, belong to the first side.

    Args:
        counts: Number of equal values, for each value.
        size: Number of values on each side.
    """
    ways: dict[tuple[int, float], float] = {(0, 0.0): 1.0}
    for count in counts:
        more: dict[tuple[int, float], float] = defaultdict(float)
        for (taken, total), number in ways.items():
            for a in range(min(count, size - taken) + 1):
                more[taken + a, round(total + (2 * a - count) ** 2 / count, 6)] += number * math.comb(count, a)
        ways = more
    found: dict[int, float] = defaultdict(float)
    for (taken, total), number in ways.items():
        if taken == size:
            found[_units(total)] += number / math.comb(2 * size, size)
    return found


def _units(value: float) -> int:
    """Return a distance as a whole number, so that the order of a sum does not matter."""
    return round(value * 100)


def chi_square(pairs: Sequence[Pair]) -> tuple[float, int]:
    """Compare distributions over all prompts together: Pearson's chi-square with rare values pooled.

    Returns:
        The p-value, and the degrees of freedom.
    """
    total, freedom = 0.0, 0
    for a, b in pairs:
        count = Counter(a) + Counter(b)
        kept = {value for value, n in count.items() if n >= MIN_CELL_VALUES}
        cells = [[value if value in kept else None for value in side] for side in (a, b)]
        freedom += len(kept) + (len(kept) < len(count)) - 1
        total += distance(*cells)
    return (gamma_tail(freedom / 2, total / 2) if freedom else 1.0), freedom


def gamma_tail(shape: float, x: float) -> float:
    """Return the regularised upper incomplete gamma function Q(shape, x)."""
    if x <= 0:
        return 1.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for k in range(1, 10_000):
            term *= x / (shape + k)
            total += term
            if term < total * 1e-15:
                break
        return max(0.0, 1 - front * total)
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    fraction = d
    for k in range(1, 10_000):  # Lentz's algorithm for the continued fraction
        a = k * (shape - k)
        b += 2
        d = 1 / (a * d + b or 1e-300)
        c = b + a / c or 1e-300
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction


def detectable(pairs: Sequence[Pair], alpha: float, power: float = 0.95) -> float:
    """Return the smallest shift that `chi_square` would have found with this probability, in total variation.

    The shift stands for a drafter that is accepted too often: a share x of the replies is replaced by the most likely
    reply to the prompt. The statistic is then noncentral chi-square, here approximated by a normal distribution.
    """
    _, freedom = chi_square(pairs)
    tops = [Counter([*a, *b]).most_common(1)[0][1] / (len(a) + len(b)) for a, b in pairs]
    moved = sum(1 - top for top in tops) / max(1, len(tops))
    if not freedom or not moved:
        return 1.0
    limit = _bisected(lambda x: gamma_tail(freedom / 2, x / 2) < alpha, 0.0, 10 * freedom + 1000.0)

    def is_found(x: float) -> bool:
        """Return True if a share x of replaced replies is found with this probability."""
        shift = 0.0
        for (a, _), top in zip(pairs, tops, strict=True):
            shift += len(a) / 2 * x * x * ((1 - top) ** 2 / (top + x * (1 - top) / 2) + (1 - top) / (1 - x / 2))
        return freedom + shift - NormalDist().inv_cdf(power) * math.sqrt(2 * (freedom + 2 * shift)) > limit

    return _bisected(is_found, 0.0, 1.0) * moved if is_found(1.0) else 1.0


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest value for which a monotonic condition holds."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def mcnemar(worse: int, better: int) -> float:
    """Return the exact two-sided p-value of a paired comparison, from the questions that only one side got right."""
    n = worse + better
    ways = sum(math.comb(n, k) for k in range(min(worse, better) + 1))
    return min(1.0, 2 * ways / int(2**n))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p-value for the hypothesis that differences are as likely to be positive as negative.

    The normal approximation of the sign-flip test: n differences of one sign have a statistic of at most sqrt(n).
    """
    squares = sum(x * x for x in differences)
    return math.erfc(abs(sum(differences)) / math.sqrt(2 * squares)) if squares else 1.0


def fisher(hits: int, of: int, plain_hits: int, plain_of: int) -> float:
    """Return the one-sided p-value of Fisher's exact test: does the first side have more hits?"""
    drawn = hits + plain_hits
    ways = [math.comb(of, k) * math.comb(plain_of, drawn - k) for k in range(hits, min(of, drawn) + 1)]
    return sum(ways) / math.comb(of + plain_of, drawn)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return which tests are rejected. The probability of any false rejection is at most `alpha` (Holm, 1979)."""
    rejected = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


def median_interval(values: Sequence[float], seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Return the median of a sample, and its percentile bootstrap interval."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(1000))
    edge = int((1 - level) / 2 * 1000)
    return median(values), medians[edge], medians[-1 - edge]
