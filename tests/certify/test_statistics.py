"""The statistical tests behind certificates."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from paceline.certify import statistics
from paceline.certify.statistics import Pair


def brute_force(pairs: list[Pair]) -> float:
    """Return the p-value of the exchange test by trying every permutation."""
    observed = sum(statistics.distance(a, b) for a, b in pairs)
    totals = [0.0]
    for a, b in pairs:
        both, n = [*a, *b], len(a)
        ways = []
        for left in itertools.combinations(range(2 * n), n):
            right = [both[i] for i in range(2 * n) if i not in left]
            ways.append(statistics.distance([both[i] for i in left], right))
        totals = [x + y for x in totals for y in ways]
    return sum(x >= observed - 0.005 for x in totals) / len(totals)


@pytest.mark.parametrize(
    "pairs",
    [
        [("aaa", "bbb")],
        [("aab", "bbc"), ("aa", "ab")],
        [("aa", "bb"), ("ab", "ab"), ("cc", "dd")],
        [("abc", "def"), ("aaa", "aab")],
    ],
)
def test_the_exchange_test_counts_every_permutation(pairs: list[Pair]) -> None:
    assert statistics.exchange_test(pairs) == pytest.approx(brute_force(pairs))


def test_equal_values_are_no_difference_and_ten_of_each_are() -> None:
    assert statistics.exchange_test([("aaaa", "aaaa")]) == 1
    assert statistics.exchange_test([("a" * 10, "b" * 10)]) == pytest.approx(2 / math.comb(20, 10))
    assert statistics.exchange_test([("aabbabab", "babaabba")]) > 0.9


def test_chi_square_has_the_known_tail() -> None:
    assert statistics.gamma_tail(0.5, 3.841459 / 2) == pytest.approx(0.05, abs=1e-6)
    assert statistics.gamma_tail(5, 18.307038 / 2) == pytest.approx(0.05, abs=1e-6)
    assert statistics.gamma_tail(50, 20) == pytest.approx(1, abs=1e-5)
    assert statistics.gamma_tail(1, 30) == pytest.approx(math.exp(-30))


def test_chi_square_finds_a_shift_and_passes_equal_distributions() -> None:
    draw = random.Random(1)
    same = [(draw.choices("abcdef", k=200), draw.choices("abcdef", k=200)) for _ in range(5)]
    shifted = [(a, ["a" if draw.random() < 0.2 else x for x in b]) for a, b in same]
    assert statistics.chi_square(same)[0] > 0.01
    assert statistics.chi_square(shifted)[0] < 1e-6


@pytest.mark.slow
def test_the_stated_power_is_correct() -> None:
    """About 95 % of trials find a shift of the stated size, at the stated error rate."""
    draw, weights, alpha = random.Random(2), (8, 6, 4, 2, 1), 0.001
    sample = [(draw.choices("abcde", weights, k=300), draw.choices("abcde", weights, k=300)) for _ in range(4)]
    shift = statistics.detectable(sample, alpha)
    share = shift / (1 - 8 / 21)
    found = false = 0
    for _ in range(300):
        pairs, plain = [], []
        for _ in range(4):
            a, b, c = (draw.choices("abcde", weights, k=300) for _ in range(3))
            plain.append((c, b))
            pairs.append((["a" if draw.random() < share else x for x in a], b))
        found += statistics.chi_square(pairs)[0] < alpha
        false += statistics.chi_square(plain)[0] < alpha
    assert 0.88 < found / 300 < 0.995
    assert false <= 3


def test_exact_tests_of_counts() -> None:
    assert statistics.mcnemar(0, 0) == 1
    assert statistics.mcnemar(10, 0) == pytest.approx(2 / 1024)
    assert statistics.mcnemar(5, 5) == 1
    assert statistics.fisher(3, 3, 0, 3) == pytest.approx(1 / 20)
    assert statistics.fisher(0, 5, 5, 5) == 1


def test_holm_rejects_in_order() -> None:
    assert statistics.holm([0.001, 0.5, 0.012, 0.03], 0.05) == [True, False, True, False]
    assert statistics.holm([0.02, 0.03], 0.03) == [False, False]


def test_the_interval_of_a_median_surrounds_it() -> None:
    draw = random.Random(3)
    middle, low, high = statistics.median_interval([draw.gauss(2, 0.1) for _ in range(40)])
    assert low < middle < high
    assert low > 1.9
    assert high < 2.1
    assert Counter(statistics.median_interval([1.5])) == {1.5: 3}
