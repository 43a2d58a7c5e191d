"""The search for a tree's shape compared with all trees, and measured chances compared with the true chances."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import pytest

from paceline.drafters.independent import best_tree
from paceline.train.pointwise import Accuracy
from paceline.types import DraftBudget
from paceline.verify.tree import Place, from_paths

DEPTH, BRANCH = 3, 2
EVERY: list[Place] = [p for d in range(1, DEPTH + 1) for p in itertools.product(range(BRANCH), repeat=d)]


def trees(nodes: int) -> Iterator[tuple[Place, ...]]:
    """Yield every tree with this number of nodes."""
    for chosen in itertools.combinations(EVERY, nodes):
        if all(place[:-1] in ((), *chosen) for place in chosen):
            yield chosen


def kept(places: tuple[Place, ...], chances: Mapping[Place, float]) -> float:
    """Return the tokens per round: walk down from the root while a child is right. At most one child is right."""

    def below(place: Place) -> float:
        return sum(chances[p] * (1 + below(p)) for p in places if p[:-1] == place)

    return 1 + below(())


def any_chances(seed: int) -> dict[Place, float]:
    """Return the chance of each node given its parent. Siblings are unordered, and some have chance 0."""
    draw = random.Random(seed)
    chances = {place: max(0.0, draw.uniform(-0.1, 0.5)) for place in EVERY}
    if seed % 3 == 0:
        chances |= {place: (0.7, 0.2)[place[-1]] / len(place) for place in EVERY}  # depends only on depth and rank
    if seed % 3 == 1:
        chances |= {(0,): 1.0, (1,): 0.0, (0, 0): 1.0, (0, 1): 0.0}  # certain: equal all the way down
    return chances


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_the_same_size_keeps_more(seed: int) -> None:
    chances = any_chances(seed)
    shape = best_tree(chances.__getitem__, DraftBudget(6, DEPTH, BRANCH))
    for nodes in range(7):
        most = max(kept(tree, chances) for tree in trees(nodes))
        assert kept(shape[:nodes], chances) == pytest.approx(most)
    assert len(from_paths(shape).tokens) == len(shape), "each after the one above it"


def test_the_search_keeps_to_its_budget() -> None:
    shape = best_tree(lambda place: 0.9 / (1 + place[-1]), DraftBudget(9, 2, 3))
    assert len(shape) == 9
    assert max(map(len, shape)) == 2
    assert max(map(max, shape)) == 2
    assert best_tree(lambda place: 0.5, DraftBudget(0, 3, 2)) == ()
    assert best_tree(lambda place: 0.0, DraftBudget(9, 3, 2)) == (), "what never stands is not drafted"


def test_ranks_that_were_read_count_like_drafted_ones() -> None:
    accuracy = Accuracy()
    accuracy.add([1, 0, 7, 0], [3, 2, 4, 2])
    assert accuracy.accepted == {(1,): 1, (1, 0): 1}
    assert accuracy.tried.keys() == {(0,), (1,), (2,), (1, 0), (1, 1), *((1, 0, r) for r in range(4))}


def test_few_tries_lean_on_all_of_their_depth_and_rank() -> None:
    accuracy = Accuracy()
    for _ in range(1000):
        accuracy.add([0, 0], [2, 2])
    accuracy.add([1, 1], [2, 2])
    chance = accuracy.chances(doubt=10)
    assert chance((0, 0)) == pytest.approx(1, abs=0.01)
    assert 0.8 < chance((1, 0)) < 1, "one try says little"
    assert chance((0, 0, 0)) == chance((5,)) == 0, "never tried"
