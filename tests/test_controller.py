"""How much is drafted, in worlds where costs and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.controller import Controller
from paceline.types import Draft, Tree, Verdict

Accept = Callable[[int], float]


class World:
    """Rounds that take `base` and `per_row` more for every row, drafting `per_level`; a draft is kept to depth d + 1,
    once at d, with the chance `right`. Times are jittered, and now and then another program takes the machine."""

    def __init__(self, most: Tree, per_row: float, per_level: float, right: float, together: int = 1) -> None:
        self.controller = Controller(most)
        self.per_row, self.per_level, self.right, self.together = per_row, per_level, right, together
        self._random = random.Random(0)
        self.sizes: list[int] = []

    def seconds(self, size: Tree) -> tuple[float, float]:
        return self.per_level * size.depth, 1.0 + self.per_row * self.together * (size.nodes + 1)

    def round(self) -> tuple[float, float]:
        """(tokens of a request, seconds)."""
        size = self.controller.choose(self.together)
        self.sizes.append(size.nodes)
        drafting, verifying = self.seconds(size)
        noise = [1 + 0.1 * self._random.random() + (3.0 if self._random.random() < 0.03 else 0.0) for _ in range(2)]
        drafts, verdicts = [], []
        for _ in range(self.together):
            kept = 0
            while kept < size.depth and self._random.random() < self.right:
                kept += 1
            drafts.append(Draft.chain((0,) * size.nodes))
            verdicts.append(Verdict(tuple(range(1, kept + 1)), (0,) * (kept + 1)))
        self.controller.learn(size, drafts, verdicts, drafting * noise[0], verifying * noise[1])
        return sum(len(v.tokens) for v in verdicts) / self.together, drafting + verifying

    def speed(self, rounds: int) -> float:
        """Tokens per second over plain decoding's."""
        tokens, seconds = (sum(part) for part in zip(*(self.round() for _ in range(rounds)), strict=True))
        return tokens / seconds * self.seconds(Tree.chain(0))[1]

    def best(self) -> float:
        """What the best of all fixed sizes gives."""
        found = []
        for size in self.controller.sizes:
            tokens = sum(self.right**depth for depth in range(size.depth + 1))
            found.append(tokens / sum(self.seconds(size)))
        return max(found) * self.seconds(Tree.chain(0))[1]


@pytest.mark.parametrize("most", [Tree.chain(5), Tree.chain(12), Tree(7, 4, 2), Tree(24, 6, 4)])
@pytest.mark.parametrize("per_row", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("per_level", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_it_comes_close_to_the_best_fixed_size_and_never_much_below_none(
    most: Tree, per_row: float, per_level: float, right: float
) -> None:
    world = World(most, per_row, per_level, right)
    speed = world.speed(600)
    assert speed > 0.88 * world.best()
    assert speed > 0.97


def test_it_gives_up_and_comes_back() -> None:
    world = World(Tree.chain(5), per_row=0.02, per_level=0.3, right=0.9)
    world.speed(50)
    assert min(world.sizes[-10:]) >= 2
    world.right = 0.0
    world.speed(400)
    assert sum(world.sizes[-256:]) <= 2, "a size of one token, tried twice in 256 rounds"
    world.right = 0.9
    world.speed(300)
    assert min(world.sizes[-10:]) >= 2


def test_full_rows_leave_no_room_for_drafts() -> None:
    """Where every row costs, sixteen requests draft less than one, and each company is judged by itself."""
    world = World(Tree.chain(5), per_row=0.05, per_level=0.01, right=0.5)
    world.speed(100)
    alone = world.sizes[-20:]
    world.together = 16
    world.speed(100)
    assert sum(world.sizes[-20:]) < sum(alone)
    world.together = 1
    world.speed(20)
    assert sum(world.sizes[-20:]) > 0.7 * sum(alone)


def test_sizes_are_halves_down_to_one_and_nothing() -> None:
    assert Controller(Tree(24, 6, 4)).sizes == [
        Tree.chain(0),
        Tree(1, 1, 4),
        Tree(3, 3, 4),
        Tree(6, 6, 4),
        Tree(12, 6, 4),
        Tree(24, 6, 4),
    ]
    assert Controller(Tree.chain(5)).sizes == [Tree.chain(n) for n in (0, 1, 2, 5)]
    assert Controller(Tree.chain(0)).sizes == [Tree.chain(0)]


def test_the_end_of_a_text_teaches_nothing() -> None:
    """A draft that was cut by EOS or by the length was not wrong."""
    controller = Controller(Tree.chain(4))
    for _ in range(30):
        size = controller.choose()
        controller.learn(size, [Draft.chain((0,) * size.nodes)], [Verdict((), (0,), "eos")], 0.1, 1.0)
    assert controller.choose() == Tree.chain(4)
