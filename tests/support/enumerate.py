"""Every outcome of a program with random choices, with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)


class Script:
    """`RandomDraws` with given first choices. Later choices take the first possibility, and record the others."""

    def __init__(self, given: Sequence[int]) -> None:
        self._given, self._taken = given, list[int]()
        self.others: list[tuple[int, ...]] = []
        self.probability = 1.0

    def accept(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        return self._choose([1 - probability, probability]) == 1

    def token(self, p: Tensor) -> int:
        assert abs(float(p.sum()) - 1) < 1e-9
        return self._choose(p.tolist())

    def _choose(self, weights: Sequence[float]) -> int:
        step = len(self._taken)
        if step < len(self._given):
            choice = self._given[step]
        else:
            choice, *others = [i for i, weight in enumerate(weights) if weight > 0]
            self.others += [(*self._taken, other) for other in others]
        self._taken.append(choice)
        self.probability *= weights[choice]
        return choice


def outcomes(program: Callable[[Script], Outcome]) -> dict[Outcome, float]:
    """Return every possible result of the program with its exact probability."""
    found: dict[Outcome, float] = defaultdict(float)
    left: list[tuple[int, ...]] = [()]
    while left:
        script = Script(left.pop())
        found[program(script)] += script.probability
        left += script.others
    assert abs(sum(found.values()) - 1) < 1e-9
    return found
