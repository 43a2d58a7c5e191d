"""Draft trees that grow level by level. Each level takes one pass for the whole batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.drafters.base import Ask, Drafter
from paceline.kernels.linear import memory_bound_rows
from paceline.sampling.sampler import Ranked
from paceline.types import Draft, DraftBudget, Rows
from paceline.verify.tree import MIN_ROWS, shape

_NEXT_ACCEPTANCE = 0.7
"""Assumed probability that the next token will be accepted if its parent is accepted. It decides if another level is
drafted, before the drafter has scored that level (docs/notes/drafters.md#trees-of-a-draft-model)."""
_OUTLIER, _MEAN_COUNT = 2.0, 8.0
"""Measured times are clipped to `_OUTLIER` times the mean. The mean averages over about `_MEAN_COUNT` times."""
_MIN_DRAWN_PROBABILITY = 0.3
"""Minimum probability of a path that is extended by drawn tokens. It is a constant, because a drawn draft must not
depend on measured costs."""
ROOT = -1
"""The parent of a node that continues the pending token."""
_CPU_TREE = DraftBudget(nodes=7, depth=4, branch=3)
"""The draft size of a head on a CPU. Seven nodes and the pending token make eight rows, which fill two tiles of the
kernels (docs/notes/drafters.md#trees-for-eagle-heads-on-a-cpu)."""


def head_budget(device: torch.device) -> DraftBudget:
    """Return the default draft size of a head that drafts for a target on this device."""
    return DraftBudget(24, 6, 4) if memory_bound_rows(device) > 24 else _CPU_TREE


def without_drawn_siblings(ask: Ask, default: DraftBudget = _CPU_TREE) -> DraftBudget:
    """Return the ask's budget, or a chain if the rule draws and the budget is `default`.

    Rules that draw need a tree of fixed shape. It would spend rows on unlikely siblings.
    """
    return ask.budget.as_chain() if ask.draws and ask.budget == default else ask.budget


@dataclass(slots=True)
class DraftTree(ABC):
    """A growing tree.

    Attributes:
        budget: Maximum size of the tree.
        tokens: Token of each node.
        parents: Parent of each node. `ROOT` stands for the pending token.
        depths: Depth of each node, starting at 1.
        q: Node -> the distribution [V] that its children were drawn from. Nodes whose children were not drawn have no
            entry.
    """

    budget: DraftBudget
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    q: dict[int, Tensor] = field(default_factory=dict)

    @abstractmethod
    def grow(self, parent: int, best: Ranked) -> None:
        """Add up to `budget.branch` candidates as the children of a node."""

    @abstractmethod
    def level(self, first: int) -> list[int]:
        """Return the nodes that get children, oldest first. Only node `first` and later nodes are considered."""

    @abstractmethod
    def remaining(self, first: Sequence[int]) -> list[int]:
        """Return the nodes to keep in addition to the nodes `first`, oldest first."""

    def with_older_siblings(self, nodes: Sequence[int]) -> list[int]:
        """Return these nodes, and the siblings that must come before them in a draft, oldest first."""
        return list(nodes)

    def acceptance_probability(self, nodes: Sequence[int]) -> float:
        """Return the probability that one of these nodes, which have the same depth, is accepted, or 1 if it is
        unknown."""
        return 1.0

    def draft(self, first: Sequence[int] = ()) -> Draft:
        """Return the draft. `first`: Nodes that are always kept, and that come before the others."""
        kept = [*first, *self.remaining(first)]
        rows = {ROOT: 0} | {node: row for row, node in enumerate(kept, 1)}
        parents = tuple(rows[self.parents[node]] for node in kept)
        return Draft(tuple(self.tokens[node] for node in kept), parents, {rows[n]: q for n, q in self.q.items()})

    def add(self, token: int, parent: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent != ROOT else 1)

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path from the root to a node, including the node's own token."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


@dataclass(slots=True)
class ScoredTree(DraftTree):
    """A tree that keeps the nodes with the best log scores of their paths (EAGLE-2's rule, arXiv 2406.16858).

    Attributes:
        price: Nodes whose probability of acceptance is not higher are left out (`Ask.price`).
        scores: For each node, the estimated log-probability that it is accepted.
    """

    price: float = 0.0
    scores: list[float] = field(default_factory=list)

    def grow(self, parent: int, best: Ranked) -> None:
        above = self.scores[parent] if parent != ROOT else 0.0
        for token, score in zip(best.tokens, best.scores, strict=True):
            self.add(token, parent)
            self.scores.append(above + min(score, 0.0))

    def level(self, first: int) -> list[int]:
        nodes = self._best(self.budget.branch, range(first, len(self.tokens)))
        best = max(nodes, key=self.scores.__getitem__, default=ROOT)
        # The likeliest node gets children if its likeliest child is expected to be worth a row. Any other node adds as
        # many as `branch` rows, so it must be worth that many.
        row = self.price / _NEXT_ACCEPTANCE
        return [node for node in nodes if self._is_likelier(node, row if node == best else self.budget.branch * row)]

    def remaining(self, first: Sequence[int]) -> list[int]:
        """Return the best nodes. They form a tree, because a child never has a higher score than its parent, and the
        older node wins a tie."""
        taken = set(first)
        others = [n for n in range(len(self.tokens)) if n not in taken and self._is_likelier(n, self.price)]
        return self._best(self.budget.nodes - len(taken), others)

    def acceptance_probability(self, nodes: Sequence[int]) -> float:
        return min(1.0, sum(math.exp(self.scores[node]) for node in nodes))

    def _is_likelier(self, node: int, least: float) -> bool:
        """Return True if a node's probability of acceptance is higher than `least`."""
        return not least or math.exp(self.scores[node]) > least

    def _best(self, count: int, nodes: Sequence[int]) -> list[int]:
        """Return the `count` nodes with the highest scores, oldest first."""
        return sorted(sorted(nodes, key=lambda n: (-self.scores[n], n))[:count])


@dataclass(slots=True)
class DrawnTree(DraftTree):
    """A tree whose nodes are drawn from the drafter's distributions.

    Every candidate with a place in `tree.shape` is kept, because choosing nodes by the drawn tokens would change the
    distribution. However, a path whose probability is below `min_probability` is not extended. This is allowed because
    it depends only on the path to the node, as the distribution of its children does.
    """

    min_probability: float = 0.0
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    path_probabilities: list[float] = field(default_factory=list)

    def grow(self, parent: int, best: Ranked) -> None:
        if parent != ROOT and not self._expands(parent):
            return
        ranks, probability = (self.ranks[parent], self.path_probabilities[parent]) if parent != ROOT else ((), 1.0)
        for rank, token in enumerate(best.tokens[: shape(self.budget)[ranks]]):
            self.add(token, parent)
            self.ranks.append((*ranks, rank))
            self.path_probabilities.append(probability if best.q is None else probability * float(best.q[token]))
        if best.q is not None:
            self.q[parent] = best.q

    def level(self, first: int) -> list[int]:
        return [node for node in range(first, len(self.tokens)) if self._expands(node)]

    def with_older_siblings(self, nodes: Sequence[int]) -> list[int]:
        """Return these nodes, and all siblings that were drawn before them, because verification tries siblings in the
        order of the draws. Siblings have consecutive indices."""
        return sorted({elder for node in nodes for elder in range(node - self.ranks[node][-1], node + 1)})

    def _expands(self, node: int) -> bool:
        """Return True if the children of a node are to be drawn."""
        return self.ranks[node] in shape(self.budget) and self.path_probabilities[node] >= self.min_probability

    def remaining(self, first: Sequence[int]) -> list[int]:
        return sorted({*range(len(self.tokens))} - {*first})


@dataclass(slots=True)
class TreeGrowth:
    """The growing tree of one request.

    Attributes:
        ask: The request for a draft.
        nodes: The nodes.
        chosen: The nodes of the newest level that get children.
        row_of: Node -> row, for each node that has been fed, in the order of rows. The root's row is 0 if the pending
            token is fed in the same pass as the tree, and `NONE` otherwise.
    """

    ask: Ask
    nodes: DraftTree
    chosen: list[int] = field(default_factory=lambda: [ROOT])
    row_of: dict[int, int] = field(default_factory=lambda: {ROOT: NONE})
    _first: int = 0
    _level: int = 0

    @staticmethod
    def begin(ask: Ask, budget: DraftBudget, min_probability: float | None = None) -> TreeGrowth:
        """Begin a tree with only the root.

        Args:
            ask: The request for a draft.
            budget: Maximum size of the tree.
            min_probability: See `DrawnTree`. None for `_MIN_DRAWN_PROBABILITY`.
        """
        if min_probability is None:
            min_probability = _MIN_DRAWN_PROBABILITY
        tree = DrawnTree(budget, min_probability=min_probability) if ask.draws else ScoredTree(budget, price=ask.price)
        return TreeGrowth(ask, tree)

    @property
    def fed_nodes(self) -> list[int]:
        """The nodes that have been fed, in the order of their rows."""
        return list(self.row_of)[1:]

    @property
    def parent_rows(self) -> list[int]:
        """The parent row of each node in `fed_nodes`."""
        return [self.row_of[self.nodes.parents[node]] for node in self.fed_nodes]

    def feed(self) -> int:
        """Assign the next rows to the chosen nodes, and return the first of these rows."""
        start = self.row_of[ROOT] + len(self.row_of)
        self.row_of.update((node, row) for row, node in enumerate(self.chosen, start))
        return start

    def next_gain(self) -> float:
        """Return the expected number of additional tokens from another level."""
        return _NEXT_ACCEPTANCE * self.nodes.acceptance_probability(self.chosen)

    def descend(self) -> bool:
        """Choose the nodes of the newest level that get children. Return False if there are none."""
        self._level += 1
        self.chosen = self.nodes.level(self._first) if self._level < self.nodes.budget.depth else []
        self._first = len(self.nodes.tokens)
        return bool(self.chosen)


class TreeDrafter(Drafter):
    """A drafter that grows trees level by level, with one pass per level for the whole batch.

    Candidates are ranked with the sampler's noise, so the draft predicts the target's draws at any temperature. Up to
    `branch` nodes of a level get `branch` children each, and the best `nodes` nodes of the tree are kept. If
    `Ask.price` is above 0, nodes whose probability of acceptance does not exceed it are dropped, and a node needs a
    higher probability to get children. The rules `rejection` and `block` need drawn candidates instead. For these
    rules, the tree has a fixed shape, except that unlikely paths are not extended.

    If `Ask.pace` is known, another level is grown only if it is expected to yield more tokens than decoding would yield
    in the same time. If it is not known, a request's draft does not depend on the batch, unless its logits do.
    """

    _level_seconds: float | None = None
    """Mean seconds per level, without the root. None before the first level."""

    @abstractmethod
    def limit(self, ask: Ask) -> DraftBudget:
        """Return the ask's budget, reduced to what can be drafted now. If it has 0 nodes, the request takes part in no
        pass."""

    @abstractmethod
    def roots(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        """Feed all tokens of these requests that have not been fed, including the pending tokens.

        Returns:
            For each request, the logits [1, V] after its pending token.
        """

    @abstractmethod
    def level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        """Feed the `chosen` nodes of all these trees in one pass (see `pack_level`).

        The parents of these nodes have been fed by `roots` or by an earlier level. If a request is missing here, its
        tree is finished for this round.

        Returns:
            For each tree, the logits [len(chosen), V] after its chosen nodes, in order.
        """

    def rank(self, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int) -> list[Ranked]:
        """Return the candidates for each row of logits [R, V], given its path (see `Sampler.rank`)."""
        return growth.ask.rank(logits, paths, count)

    def finished_draft(self, growth: TreeGrowth) -> Draft:
        """Return the draft of a finished tree."""
        return growth.nodes.draft()

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        growths = [TreeGrowth.begin(ask, self.limit(ask)) for ask in asks]
        grow_trees(growths, self.roots, self._timed_level, self.rank, self._pays)
        return [self.finished_draft(growth) for growth in growths]

    def _timed_level(self, growths: Sequence[TreeGrowth]) -> Sequence[Tensor]:
        began = perf_counter()
        logits = self.level(growths)
        seconds, mean = perf_counter() - began, self._level_seconds
        self._level_seconds = seconds if mean is None else mean + (min(seconds, _OUTLIER * mean) - mean) / _MEAN_COUNT
        return logits

    def _pays(self, growths: Sequence[TreeGrowth]) -> bool:
        """Return True if another level is worth its time, for all these trees together."""
        # If a draft already has its maximum number of nodes, growing it adds no rows to verification, so the price does
        # not apply.
        full = [len(growth.nodes.remaining(())) == growth.nodes.budget.nodes for growth in growths]
        gain = sum(g.next_gain() - (0.0 if is_full else g.ask.price) for g, is_full in zip(growths, full, strict=True))
        return gain >= growths[0].ask.pace * (self._level_seconds or 0.0)


def grow_trees(
    growths: Sequence[TreeGrowth],
    roots: Callable[[Sequence[TreeGrowth]], Sequence[Tensor]],
    level: Callable[[Sequence[TreeGrowth]], Sequence[Tensor]],
    rank: Callable[[TreeGrowth, Tensor, Sequence[Sequence[int]], int], list[Ranked]],
    pays: Callable[[Sequence[TreeGrowth]], bool] = lambda growths: True,
) -> None:
    """Grow all trees together.

    Args:
        growths: The trees.
        roots: See `TreeDrafter.roots`. It is called once.
        level: See `TreeDrafter.level`. It is called once per depth.
        rank: See `TreeDrafter.rank`.
        pays: Returns False if another level is not worth its time.
    """
    growing = [growth for growth in growths if growth.nodes.budget.nodes]
    read = roots
    while growing:
        for growth, logits in zip(growing, read(growing), strict=True):
            nodes = growth.nodes
            ranked = rank(growth, logits, [nodes.path(node) for node in growth.chosen], nodes.budget.branch)
            for node, best in zip(growth.chosen, ranked, strict=True):
                nodes.grow(node, best)
        growing = [growth for growth in growing if growth.descend()]
        if growing and not pays(growing):
            break
        read = level


def logits_of(states: Tensor, counts: Sequence[int], logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return, for each slot b, the logits [counts[b], V] of its first rows.

    Args:
        states: Hidden states [B, T, H].
        counts: Number of rows of each slot. Other rows are not computed.
        logits: Output head. It always receives at least `MIN_ROWS` rows.
    """
    real = torch.cat([line[:count] for line, count in zip(states, counts, strict=True)])
    filled = F.pad(real, (0, 0, 0, max(0, MIN_ROWS - len(real))))
    return list(logits(filled)[: len(real)].split(list(counts)))


def pack_level(
    growths: Sequence[TreeGrowth], slots: Sequence[int], lengths: Sequence[int], device: torch.device
) -> Rows:
    """Return the rows of one level: the chosen nodes of each tree, which follow the rows of its earlier levels.

    Args:
        growths: The trees.
        slots: Cache slot of each tree.
        lengths: Committed length of each slot, which is the position of nodes at depth 1.
        device: Device of the rows.
    """
    counts = tuple(len(growth.chosen) for growth in growths)
    count = max(-(-MIN_ROWS // len(growths)), *counts)
    tokens, positions, parents, starts = [], [], [], []
    for growth, length in zip(growths, lengths, strict=True):
        starts.append(growth.feed())
        padding = count - len(growth.chosen)
        nodes = [*growth.chosen, *growth.chosen[:1] * padding]
        tokens.append([growth.nodes.tokens[node] for node in nodes])
        positions.append([length - 1 + growth.nodes.depths[node] for node in nodes])
        parents.append((*growth.parent_rows, *[NONE] * padding))
    return Rows(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=tuple(slots),
        lengths=tuple(lengths),
        parents=tuple(parents),
        starts=tuple(starts),
        counts=counts,
    )
