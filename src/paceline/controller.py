"""How much to draft next, or nothing: what writes the most tokens per second, by what rounds have cost and given."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from paceline.types import Draft, Tree, Verdict

_MEMORY = 0.97
"""What a round still weighs when the next one is counted: texts change within some thirty rounds."""
_HOPE = 0.6
"""How often a draft is taken for right before any was seen."""
_FAITH = 4.0
"""Rounds that this weighs."""
_HEARSAY = 0.2
"""What a round weighs for the sizes that it was not made with."""
_TIMES = 9
"""Passes of a size whose median is what it costs: other programs run on this machine too."""
_SLOPE = 0.03
"""What a row more costs of a pass, as long as too few sizes were seen to tell."""
_OFTEN, _RARE = 8, 128
"""Rounds between two probes, while they teach something and when they have long taught nothing."""


class _Kept:
    """How far drafts of one size were right: of the rounds kept to depth d, how many were kept to d + 1. Fading.

    Of a depth that was hardly ever reached it hopes for what the depth before gave.
    """

    def __init__(self, depth: int) -> None:
        self._reached, self._kept, self._hope = [0.0] * depth, [0.0] * depth, [_FAITH] * depth

    def add(self, accepted: int, depth: int, weight: float) -> None:
        """A round whose draft, `depth` deep, was right for `accepted` tokens."""
        fade = _MEMORY**weight
        for d in range(min(depth, accepted + 1, len(self._kept))):
            self._reached[d] = fade * self._reached[d] + weight
            self._kept[d] = fade * self._kept[d] + weight * (d < accepted)
            self._hope[d] *= fade

    def tokens(self) -> float:
        """What a round may be expected to give, the target's own token included."""
        total, chance, share = 1.0, 1.0, _HOPE
        for reached, kept, hope in zip(self._reached, self._kept, self._hope, strict=True):
            share = (kept + hope * share) / (reached + hope)
            chance *= share
            total += chance
        return total


class Controller:
    """Picks a size of draft for every round, from nothing to all that the drafter likes to make.

    It knows the median time of a target pass by its rows, that of drafting by its size, and how acceptance falls with
    depth, and takes the size with the most tokens per second. Now and then it tries another one, ever more rarely while
    that teaches nothing. What it knows outlives requests. It decides how soon a text comes, never which.
    """

    def __init__(self, most: Tree) -> None:
        self.sizes: list[Tree] = _sizes(most)
        """From nothing to `most`."""
        self._kept = [_Kept(size.depth) for size in self.sizes]
        # A chain begins as a longer one does, so that every length tells of all; a smaller tree is right less often.
        self._hearsay = 1.0 if most.branch == 1 else _HEARSAY
        self._passes: dict[int, deque[float]] = {}
        self._drafting: dict[tuple[int, int], deque[float]] = {}
        self._last: dict[int, Tree] = {}
        self._tried = [0] * len(self.sizes)
        self._round, self._next, self._pause = 0, _OFTEN, _OFTEN

    def choose(self, together: int = 1) -> Tree:
        """For a round of so many requests."""
        self._round += 1
        rates = [self._rate(size, together) for size in range(len(self.sizes))]
        best = rates.index(max(rates))
        if self._last.get(together) != self.sizes[best]:
            self._last[together] = self.sizes[best]
            self._pause = _OFTEN
        elif self._round >= self._next:
            self._pause = min(2 * self._pause, _RARE)
            best = self._neglected(best)
        if self._round >= self._next:
            self._next = self._round + self._pause
        self._tried[best] = self._round
        return self.sizes[best]

    def _neglected(self, best: int) -> int:
        """Of the two sizes beside the best one, that which was tried longest ago."""
        beside = [size for size in (best - 1, best + 1) if 0 <= size < len(self.sizes)]
        return min(beside, key=lambda size: self._tried[size], default=best)

    def learn(
        self, size: Tree, drafts: Sequence[Draft], verdicts: Sequence[Verdict], drafting: float, verifying: float
    ) -> None:
        """What a round of this size gave each request, and what it cost in seconds."""
        together = len(drafts)
        at = self.sizes.index(size)
        rows = together * (1 + max(len(draft.tokens) for draft in drafts))
        self._passes.setdefault(rows, deque(maxlen=_TIMES)).append(verifying)
        self._drafting.setdefault((at, together), deque(maxlen=_TIMES)).append(drafting)
        for verdict in verdicts:
            if at and verdict.finish is None:
                for other, kept in enumerate(self._kept):
                    kept.add(len(verdict.path), size.depth, 1.0 if other == at else self._hearsay)

    def _rate(self, size: int, together: int) -> float:
        """Tokens per second of each request; per pass of a row while nothing was timed."""
        rows = together * (1 + self.sizes[size].nodes)
        return self._kept[size].tokens() / (self._pass(rows) + self._draft(size, together))

    def _pass(self, rows: int) -> float:
        """Seconds of a target pass: the median of those seen, a line between two sizes that were seen."""
        below = max((n for n in self._passes if n <= rows), default=None)
        above = min((n for n in self._passes if n >= rows), default=None)
        if below is None and above is None:
            return 1.0 + _SLOPE * rows
        if below is None or above is None:
            near = below if below is not None else above
            assert near is not None
            return median(self._passes[near]) * (1 + _SLOPE * rows) / (1 + _SLOPE * near)
        low, high = median(self._passes[below]), median(self._passes[above])
        share = (rows - below) / (above - below) if above > below else 0.0
        return low + share * (high - low)

    def _draft(self, size: int, together: int) -> float:
        """Seconds of drafting: the median of those seen, else of the next larger size, in proportion to depth."""
        if size == 0:
            return 0.0
        for larger in range(size, len(self.sizes)):
            if seen := self._drafting.get((larger, together)):
                return median(seen) * self.sizes[size].depth / self.sizes[larger].depth
        return 0.0


def _sizes(most: Tree) -> list[Tree]:
    """Nothing, and the drafts of half, a quarter, ... of the nodes, down to one, smallest first."""
    sizes = [most]
    while sizes[0].nodes > 1:
        nodes = sizes[0].nodes // 2
        sizes.insert(0, most.within(min(most.depth, nodes), nodes))
    return sizes if not most.nodes else [Tree.chain(0), *sizes]
