"""The best tree of a fixed shape: measure at which places drafted tokens are accepted, then take the likeliest.

accuracy = Accuracy()
llm = paceline.load(..., drafter=Measured(drafter, accuracy), draft=DraftBudget(60, 4, 8))  # wide, and let it write
shape = best(accuracy.chances(), DraftBudget(64, 4, 8)).fastest({4: 0.0099, 8: 0.0133, 16: 0.0157, 64: 0.046})
places(budget, shape.places)  # or MedusaConfig.paths
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import zip_longest

import numpy as np
from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.stack import DrafterWrapper
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import Place

Chance = Callable[[Place], float]
"""The probability that a place is accepted, given that the place above it is."""


@dataclass(slots=True)
class Accuracy:
    """Acceptance by place. `tried`: how often a place was drafted and the one above it accepted; `accepted`: how
    often it was then accepted too. Neither depends on what else was drafted."""

    tried: Counter[Place] = field(default_factory=Counter)
    accepted: Counter[Place] = field(default_factory=Counter)

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """Count one round of any drafter whose siblings come in the order of their ranks, without gaps."""
        below: defaultdict[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(draft.parents, 1):
            below[parent].append(row)
        ranks = [below[above].index(row) for above, row in zip((0, *verdict.path), verdict.path, strict=False)]
        # A text that ended inside the path says nothing of what hangs below its last token.
        self.add(ranks, [len(below[row]) for row in (0, *verdict.path)[: len(verdict.tokens)]])

    def add(self, ranks: Sequence[int], widths: Sequence[int]) -> None:
        """Count one path: at each depth the rank of the target's token, among `widths` candidates.

        A rank beyond them is a miss, and nothing below a miss is counted.
        """
        place: Place = ()
        for rank, width in zip_longest(ranks, widths):
            self.tried.update((*place, other) for other in range(width or 0))
            if rank is None or rank >= (width or 0):
                break
            place = (*place, rank)
            self.accepted[place] += 1

    def chances(self, doubt: float = 20.0) -> Chance:
        """Return the measured acceptance of each place, smoothed by `doubt` (> 0) rounds with the average of its
        depth and rank. 0 for depths and ranks that were never tried."""
        tried, accepted = (_together(counts) for counts in (self.tried, self.accepted))

        def chance(place: Place) -> float:
            kind = len(place), place[-1]
            usual = accepted[kind] / tried[kind] if tried[kind] else 0.0
            return (self.accepted[place] + doubt * usual) / (self.tried[place] + doubt)

        return chance


class Measured(DrafterWrapper):
    """Drafter that counts the acceptance of another one's trees; the last round of a reply is not observed."""

    def __init__(self, inner: Drafter, accuracy: Accuracy) -> None:
        super().__init__(inner)
        self._accuracy = accuracy
        self._drafts: dict[int, Draft] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        self._drafts.update((ask.slot, draft) for ask, draft in zip(asks, drafts, strict=True))
        return drafts

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._accuracy.count(self._drafts.pop(slot, Draft()), verdict)
        super().observe(slot, verdict, out)


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """`places`: the most useful first. `expected[n]`: tokens per round with the first n, the target's own included."""

    places: tuple[Place, ...]
    expected: tuple[float, ...]

    def fastest(self, seconds: Mapping[int, float], drafting: float = 0.0) -> MeasuredShape:
        """Return the number of places that gives the most tokens per second; none where no draft pays.

        `seconds`: what a pass of so many rows takes, the places and the pending token; in between it is interpolated,
        and no pass is larger than the largest. `drafting`: what a round's draft takes besides, however large.
        """
        rows, times = zip(*sorted(seconds.items()), strict=True)
        counts = range(min(len(self.places), rows[-1] - 1) + 1)
        took = np.interp([n + 1 for n in counts], rows, times) + [drafting * (n > 0) for n in counts]
        most = max(counts, key=lambda n: self.expected[n] / took[n])
        return MeasuredShape(self.places[:most], self.expected[: most + 1])


def best(chance: Chance, budget: DraftBudget) -> MeasuredShape:
    """Return the tree within the budget that accepts the most tokens per round, and with it every smaller one.

    A place stands with the product of the chances on its path, so a round keeps the sum of these products over all
    places. No place has more than the one above it: the places with the highest products are a tree, and no other tree
    has a higher sum (the greedy rule of Medusa's trees, arXiv 2401.10774, and of Sequoia's, arXiv 2402.12374). Places
    without a chance are left out.
    """
    heap: list[tuple[float, Place]] = [(-1.0, ())]
    kept: list[Place] = []
    expected = [1.0]
    while heap and len(kept) < budget.nodes:
        odds, place = heappop(heap)
        if place:
            kept.append(place)
            expected.append(expected[-1] - odds)
        for rank in range(budget.branch if len(place) < budget.depth else 0):
            below = (*place, rank)
            if (chances := odds * chance(below)) < 0.0:
                heappush(heap, (chances, below))
    return MeasuredShape(tuple(kept), tuple(expected))


def _together(counts: Mapping[Place, int]) -> Counter[tuple[int, int]]:
    """Summed by depth and rank."""
    sums: Counter[tuple[int, int]] = Counter()
    for place, count in counts.items():
        sums[len(place), place[-1]] += count
    return sums
