"""Trees from heads that predict each depth independently, and the best tree for known acceptance probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from torch import Tensor

from paceline.drafters.base import Ask
from paceline.sampling.sampler import Ranked, Subset
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import Place, places, renumber_siblings

AcceptanceProbability = Callable[[Place], float]
"""A function that returns the probability that a place is accepted, given that its parent is accepted."""


def best_tree(probability_of: AcceptanceProbability, budget: DraftBudget) -> tuple[Place, ...]:
    """Return the tree with the highest expected number of accepted tokens per round. The best places come first.

    The probability that a place is accepted is the product of the probabilities on its path, and a round accepts, on
    average, the sum of these products. A place's product is never higher than its parent's. So the places with the
    highest products form a tree, and no other tree has a higher sum. Medusa (arXiv 2401.10774) and Sequoia (arXiv
    2402.12374) use this greedy rule. Places with probability 0 are omitted.

    Args:
        probability_of: Acceptance probabilities. They must be at most 1.
        budget: Maximum size of the tree.
    """
    heap: list[tuple[float, Place]] = [(-1.0, ())]  # the heap returns the smallest entry, so probabilities are negated
    kept: list[Place] = []
    while heap and len(kept) <= budget.nodes:
        negated, place = heappop(heap)
        kept.append(place)
        for rank in range(budget.branch if len(place) < budget.depth else 0):
            child = (*place, rank)
            if (product := negated * probability_of(child)) < 0.0:
                heappush(heap, (product, child))
    return tuple(kept[1:])


def draft_independently(ask: Ask, budget: DraftBudget, logits: Tensor, subset: Subset | None = None) -> Draft:
    """Return one request's draft.

    It consists of the likeliest nodes. A node's probability is the product along its path. For an acceptance rule that
    draws, the shape is fixed in advance (see `fixed_tree`).

    Args:
        ask: The request for a draft.
        budget: Maximum size of the draft.
        logits: Logits [D, V]. Row d predicts the token at depth d + 1.
        subset: See `Sampler.rank`.
    """
    logits = logits[: budget.depth].cpu()
    if ask.draws:
        shape = fixed_tree(budget.within(len(logits)), (), True)
        return shape.draft(rank_by_depth(ask, logits, shape.widths, subset))
    return _most_likely_tree(budget, rank_by_depth(ask, logits, [budget.branch] * len(logits), subset))


def rank_by_depth(ask: Ask, logits: Tensor, widths: Sequence[int], subset: Subset | None = None) -> list[Ranked]:
    """Return `widths[d]` candidates for each depth d, ranked by its row of logits [D, V].

    Logits processors see the path of the best candidates at smaller depths. Below other parents, a child may be one
    that a processor would forbid. This only wastes the node.

    With the rules `rejection` and `block`, candidates are drawn once per depth, for all parents. The output
    distribution stays correct for three reasons. Acceptance follows a single path, so it uses the draws of a depth
    once. Its decisions at smaller depths depend on other draws. And if a processor changes q because of tokens that
    were drawn at smaller depths, the draws at this depth come from the changed q.
    """
    ranked: list[Ranked] = []
    path: list[int] = []
    for row, width in zip(logits, widths, strict=False):
        ranked += ask.rank(row[None], [path], width, subset)
        # If a depth has no candidates, the tree ends above it, so any token may complete the path.
        path.append(ranked[-1].tokens[0] if ranked[-1].tokens else 0)
    return ranked


def _most_likely_tree(budget: DraftBudget, ranked: Sequence[Ranked]) -> Draft:
    """Return the tree of `best_tree`, for probabilities that decrease with the rank.

    A node's first child and its next sibling are never likelier than the node. When a node is added, it is therefore
    enough to consider these two, instead of all siblings.
    """
    costs = [[-score for score in ranking.scores] for ranking in ranked]
    tokens: list[int] = []
    parents: list[int] = []
    # Each entry: cost of the path, cost of the parent's path, rank, depth, row of the parent.
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
    """A tree of fixed shape.

    Attributes:
        nodes: Parent row, depth (starting at 0) and rank of each node.
        widths: Number of candidates that each depth needs.
    """

    nodes: tuple[tuple[int, int, int], ...]
    widths: tuple[int, ...]

    def draft(self, ranked: Sequence[Ranked]) -> Draft:
        """Return the draft with these candidates, given by depth. Places without a candidate are omitted."""
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


def _taper(closed: Sequence[Place]) -> tuple[Place, ...]:
    """Return the places of a smaller tree, where every descendant of an only child is itself an only child.

    `closed`: Places numbered without gaps, so that an only child has no sibling with rank 1.
    """
    every = {*closed}

    def stays(place: Place) -> bool:
        only = next((n for n in range(len(place)) if (*place[:n], 1) not in every), len(place))
        return not any(place[only:])

    return tuple(place for place in closed if stays(place))


@lru_cache(maxsize=256)
def fixed_tree(budget: DraftBudget, order: tuple[Place, ...], drawn: bool) -> FixedTree:
    """Return a tree of fixed shape.

    Depending on earlier draws, a logits processor may leave a depth with fewer candidates than places. The rule `block`
    verifies chains as a whole, so draws inside a chain must not decide whether it is a chain. A drawn tree therefore
    never branches below an only child (`_taper`).

    Args:
        budget: Maximum size of the tree.
        order: See `tree.places`.
        drawn: True if siblings are drawn. Their ranks then have no gaps, and only a chain continues an only child.
    """
    kept = places(budget, order)
    kept = _taper(renumber_siblings(kept)) if drawn else kept
    rows: dict[Place, int] = {place: row for row, place in enumerate(((), *kept))}
    nodes = tuple((rows[place[:-1]], len(place) - 1, place[-1]) for place in kept)
    depth = max(map(len, kept), default=0)
    return FixedTree(nodes, tuple(1 + max(place for _, at, place in nodes if at == level) for level in range(depth)))
