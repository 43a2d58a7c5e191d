from __future__ import annotations

import pytest
import torch

from paceline.drafters.vocabulary import choose, count, coverage
from paceline.errors import InvalidOption

COUNTS = count([[3, 3, 3, 3], [1, 1, 1], [5, 5], [2]], 8)


def test_tokens_are_counted_over_all_texts_however_many() -> None:
    assert COUNTS.tolist() == [0, 3, 1, 4, 0, 2, 0, 0]
    many = count(([i % 7] * 100 for i in range(2100)), 9)
    assert many.tolist() == [30_000] * 7 + [0, 0]
    assert count([], 4).tolist() == [0] * 4


def test_the_most_frequent_and_the_required_tokens_are_chosen() -> None:
    assert choose(COUNTS, 3).tolist() == [1, 3, 5]
    assert choose(COUNTS, 3, always=[7]).tolist() == [1, 3, 7]
    assert choose(COUNTS, 2, always=[7, 6, 7]).tolist() == [6, 7]
    assert choose(COUNTS, 6).tolist() == [0, 1, 2, 3, 4, 5], "of tokens that never came, the lowest"
    assert choose(COUNTS, 8).tolist() == list(range(8))


def test_coverage_is_the_share_of_counted_tokens() -> None:
    assert coverage(COUNTS, torch.tensor([3, 1])) == 0.7
    assert coverage(COUNTS, torch.tensor([3, 3])) == 0.4
    assert coverage(COUNTS, torch.tensor([7])) == 0.0
    assert coverage(torch.zeros(4, dtype=torch.int64), torch.tensor([1])) == 1.0


@pytest.mark.parametrize(("size", "always"), [(0, []), (9, []), (1, [2, 3])])
def test_sizes_that_are_none(size: int, always: list[int]) -> None:
    with pytest.raises(InvalidOption, match="draft vocabulary"):
        choose(COUNTS, size, always)


def test_tokens_that_are_none() -> None:
    with pytest.raises(InvalidOption, match="below the vocabulary size 8, got 9"):
        count([[1, 9]], 8)
