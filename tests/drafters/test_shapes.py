"""The search for a tree's shape against every tree there is, and what is measured against what was put in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import pytest

from paceline.drafters.model import DraftModel
from paceline.drafters.shapes import Accuracy, Measured, MeasuredShape, best
from paceline.sampling.parameters import Sampling
from paceline.testing import run, tiny_target
from paceline.types import Draft, DraftBudget, Verdict
from paceline.verify.tree import Place, from_paths

DEPTH, BRANCH = 3, 2
EVERY: list[Place] = [p for d in range(1, DEPTH + 1) for p in itertools.product(range(BRANCH), repeat=d)]


def trees(nodes: int) -> Iterator[tuple[Place, ...]]:
    """Every tree of so many places."""
    for chosen in itertools.combinations(EVERY, nodes):
        if all(place[:-1] in ((), *chosen) for place in chosen):
            yield chosen


def kept(places: tuple[Place, ...], chances: Mapping[Place, float]) -> float:
    """Tokens per round, by playing it: from the root down while a child stands, at most one of which does."""

    def below(place: Place) -> float:
        return sum(chances[p] * (1 + below(p)) for p in places if p[:-1] == place)

    return 1 + below(())


def any_chances(seed: int) -> dict[Place, float]:
    """Of each place given the one above it; no order among siblings, some of which never stand."""
    draw = random.Random(seed)
    chances = {place: max(0.0, draw.uniform(-0.1, 0.5)) for place in EVERY}
    if seed % 3 == 0:
        chances |= {place: (0.7, 0.2)[place[-1]] / len(place) for place in EVERY}  # by depth and rank alone
    if seed % 3 == 1:
        chances |= {(0,): 1.0, (1,): 0.0, (0, 0): 1.0, (0, 1): 0.0}  # certain: equal all the way down
    return chances


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_as_many_nodes_keeps_more(seed: int) -> None:
    chances = any_chances(seed)
    shape = best(chances.__getitem__, DraftBudget(6, DEPTH, BRANCH))
    for nodes in range(7):
        most = max(kept(tree, chances) for tree in trees(nodes))
        at = min(nodes, len(shape.places))
        assert shape.expected[at] == pytest.approx(most)
        assert kept(shape.places[:at], chances) == pytest.approx(most), "the prediction is what playing it gives"
    assert len(from_paths(shape.places).tokens) == len(shape.places), "each after the one above it"


def test_the_search_keeps_to_its_budget() -> None:
    shape = best(lambda place: 0.9 / (1 + place[-1]), DraftBudget(9, 2, 3))
    assert len(shape.places) == 9
    assert max(map(len, shape.places)) == 2
    assert max(map(max, shape.places)) == 2
    assert best(lambda place: 0.5, DraftBudget(0, 3, 2)) == MeasuredShape((), (1.0,))
    assert best(lambda place: 0.0, DraftBudget(9, 3, 2)) == MeasuredShape((), (1.0,)), (
        "what never stands is not drafted"
    )


def test_the_fastest_size_is_the_one_with_the_most_tokens_per_second() -> None:
    shape = best(lambda place: 0.7 * 0.25 ** place[-1], DraftBudget(60, 6, 4))
    seconds = {4: 0.010, 8: 0.013, 16: 0.016, 32: 0.031}
    speeds = []
    for n in range(32):
        low, high = max(r for r in seconds if r <= max(n + 1, 4)), min(r for r in seconds if r >= n + 1)
        part = 0.0 if low == high else (n + 1 - low) / (high - low)
        took = seconds[low] + max(0.0, part) * (seconds[high] - seconds[low])
        speeds.append(shape.expected[n] / (took + 0.002 * (n > 0)))
    fastest = shape.fastest(seconds, drafting=0.002)
    assert len(fastest.places) == speeds.index(max(speeds))
    assert fastest.places == shape.places[: len(fastest.places)]
    assert len(fastest.expected) == len(fastest.places) + 1
    assert shape.fastest({1: 0.010, 2: 0.020, 64: 0.500}).places == (), "no draft where none pays"
    assert len(shape.fastest({1: 0.010, 61: 0.010}).places) == 60, "all where rows cost nothing"


def test_a_round_counts_what_it_tried() -> None:
    #  0: 1, 2, 3; 1: 4, 5; 4: 6
    draft = Draft((10, 11, 12, 13, 14, 15), (0, 0, 0, 1, 1, 4))
    accuracy = Accuracy()
    accuracy.count(draft, Verdict((1, 5), (10, 14, 9)))
    assert accuracy.accepted == {(0,): 1, (0, 1): 1}
    assert accuracy.tried == {(0,): 1, (1,): 1, (2,): 1, (0, 0): 1, (0, 1): 1}
    accuracy.count(draft, Verdict((), (9,)))
    accuracy.count(draft, Verdict((3,), (12, 9)))
    assert accuracy.tried[1,] == 3
    assert accuracy.accepted == {(0,): 1, (2,): 1, (0, 1): 1}
    accuracy.count(draft, Verdict((1,), (10,), "length"))
    assert accuracy.accepted[0,] == 2
    assert accuracy.tried[0, 0] == 1, "the reply ended there: nobody knows what would have stood"


def test_ranks_that_were_read_count_as_those_that_were_drafted() -> None:
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


def test_a_model_that_is_measured_is_predicted() -> None:
    """The measured chances of a fixed tree say how many tokens per round the same tree keeps."""
    target, other = tiny_target(), tiny_target(seed=9)
    accuracy, budget = Accuracy(), DraftBudget(12, 3, 4)
    prompt, rounds, tokens = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9], 0, 0
    for seed in range(6):
        sampling = Sampling(max_new_tokens=40, temperature=3.0, seed=seed, rule="rejection")
        text, _, stats = run(target, prompt, sampling, Measured(DraftModel(other, 37), accuracy), budget)
        assert text == run(target, prompt, sampling, DraftModel(other, 37), budget)[0], "to look changes nothing"
        rounds, tokens = rounds + stats.rounds, tokens + stats.tokens
    assert tokens / rounds > 1.3
    shape = best(accuracy.chances(doubt=1e-9), budget)
    assert sum(accuracy.tried.values()) > 0
    assert shape.expected[-1] == pytest.approx(tokens / rounds, rel=0.05)
