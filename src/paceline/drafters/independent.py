"""Trees from heads that predict several depths at once, independently of each other; the best tree of given chances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from torch import Tensor

from paceline.drafters.base import Ask
from paceline.sampling.sampler import Ranked, Subset
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import Place, close, places

Chance = Callable[[Place], float]
"""The probability that a place is accepted, given that the place above it is."""


def best(chance: Chance, budget: DraftBudget) -> tuple[Place, ...]:
    """Return the tree within the budget that accepts the most tokens per round, the most useful places first.

    A place stands with the product of the chances on its path, so a round keeps the sum of these products over all
    places. No place has more than the one above it: the places with the highest products are a tree, and no other tree
    has a higher sum (the greedy rule of Medusa's trees, arXiv 2401.10774, and of Sequoia's, arXiv 2402.12374). Places
    without a chance are left out.
    """
    heap: list[tuple[float, Place]] = [(-1.0, ())]
    kept: list[Place] = []
    while heap and len(kept) <= budget.nodes:
        odds, place = heappop(heap)
        kept.append(place)
        for rank in range(budget.branch if len(place) < budget.depth else 0):
            below = (*place, rank)
            if (chances := odds * chance(below)) < 0.0:
                heappush(heap, (chances, below))
    return tuple(kept[1:])


def independent(ask: Ask, budget: DraftBudget, logits: Tensor, subset: Subset | None = None) -> Draft:
    """Return one request's draft within `budget`, row d of logits [D, V] being the prediction at depth d + 1.

    It holds the likeliest nodes of all, a node's probability being the product along its path. Under a rule that draws,
    the shape is fixed beforehand (`fixed`). `subset`: as in `Sampler.rank`.
    """
    logits = logits[: budget.depth].cpu()
    if ask.draws:
        shape = fixed(budget.within(len(logits)), (), True)
        return shape.draft(rank(ask, logits, shape.widths, subset))
    return _likeliest(budget, rank(ask, logits, [budget.branch] * len(logits), subset))


def rank(ask: Ask, logits: Tensor, widths: Sequence[int], subset: Subset | None = None) -> list[Ranked]:
    """Return `widths[d]` candidates of each depth d, from its row of logits [D, V], after the best of the depths above.

    Processors thus see the likeliest path. Other parents may get a child that a processor forbids there, which wastes
    that node only.

    Under the rules rejection and block each depth draws once for all parents. That is sound: a walk goes down one path
    and so sees the draws of a depth once; what it decided above depends on other draws; and a q that a processor bent
    by the tokens drawn above is still what the draws below it come from.
    """
    ranked: list[Ranked] = []
    path: list[int] = []
    for row, width in zip(logits, widths, strict=False):
        ranked += ask.rank(row[None], [path], width, subset)
        # Where a depth has no candidate, nothing stands below: any token will do for the path.
        path.append(ranked[-1].tokens[0] if ranked[-1].tokens else 0)
    return ranked


def _likeliest(budget: DraftBudget, ranked: Sequence[Ranked]) -> Draft:
    """Return the tree of `best` for chances that fall with the rank, without trying all siblings at once: a node's
    child and its next sibling are less likely than itself, so nothing better is missed."""
    costs = [[-score for score in ranking.scores] for ranking in ranked]
    tokens: list[int] = []
    parents: list[int] = []
    # Cost of the path, cost of the path above, rank, depth, row of the parent.
    heap = [(cost, 0.0, 0, 0, 0) for line in costs[:1] for cost in line[:1]]
    while heap and len(tokens) < budget.nodes:
        cost, above, place, depth, parent = heappop(heap)
        tokens.append(ranked[depth].tokens[place])
        parents.append(parent)
        if place + 1 < len(costs[depth]):
            heappush(heap, (above + costs[depth][place + 1], above, place + 1, depth, parent))
        if depth + 1 < len(costs) and costs[depth + 1]:
            heappush(heap, (cost + costs[depth + 1][0], cost, 0, depth + 1, len(tokens)))
    return Draft(tuple(tokens), tuple(parents))


@dataclass(frozen=True, slots=True)
class FixedTree:
    """A tree of fixed shape. `nodes`: parent row, depth (from 0) and rank of each. `widths`: candidates per depth."""

    nodes: tuple[tuple[int, int, int], ...]
    widths: tuple[int, ...]

    def draft(self, ranked: Sequence[Ranked]) -> Draft:
        """Return the draft of these candidates, without the places that have none."""
        rows: list[int | None] = [0]
        tokens: list[int] = []
        parents: list[int] = []
        q: dict[int, Tensor] = {}
        for parent, depth, place in self.nodes:
            above, ranking = rows[parent], ranked[depth]
            if above is None or place >= len(ranking.tokens):
                rows.append(None)
                continue
            tokens.append(ranking.tokens[place])
            parents.append(above)
            rows.append(len(tokens))
            if ranking.q is not None:
                q[above] = ranking.q
        return Draft(tuple(tokens), tuple(parents), q)


def _tapering(closed: Sequence[Place]) -> tuple[Place, ...]:
    """Return the places without further siblings below an only child. `closed`: numbered without gaps, so that an only
    child has no (.., 1)."""
    every = {*closed}

    def stays(place: Place) -> bool:
        only = next((n for n in range(len(place)) if (*place[:n], 1) not in every), len(place))
        return not any(place[only:])

    return tuple(place for place in closed if stays(place))


@lru_cache(maxsize=256)
def fixed(budget: DraftBudget, order: tuple[Place, ...], drawn: bool) -> FixedTree:
    """Return the tree that fits `budget` (see `tree.places`). `drawn`: siblings take draws in order, without gaps, and
    only a chain continues an only child.

    A processor may leave a depth fewer candidates than places, depending on the draws above. The rule block, which
    judges chains as a whole, must not see a chain appear or vanish with the draws inside it.
    """
    kept = places(budget, order)
    kept = _tapering(close(kept)) if drawn else kept
    rows: dict[Place, int] = {place: row for row, place in enumerate(((), *kept))}
    nodes = tuple((rows[place[:-1]], len(place) - 1, place[-1]) for place in kept)
    depth = max(map(len, kept), default=0)
    return FixedTree(nodes, tuple(1 + max(place for _, at, place in nodes if at == level) for level in range(depth)))
