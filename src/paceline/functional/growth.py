"""Build candidate trees from a drafter's logits or hidden states. This is `drafters/growth.py` for plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, DraftTree, ScoredTree, TreeGrowth, grow_trees
from paceline.drafters.independent import fixed_tree
from paceline.functional.candidates import CandidateTree, TreeConfig, expect, pack_trees, require, temperatures, widen
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import DraftBudget
from paceline.verify.tree import depths, from_paths, places, shape


@dataclass(frozen=True, slots=True)
class Level:
    """The W nodes of each request that the drafter continues next. Their position is `lengths + depth`.

    Attributes:
        tokens: int64 [B, W].
        live: True for real nodes, bool [B, W]. All other nodes have token 0, and their logits are ignored.
        depth: The depth of these nodes.
        parents: Parent of each node as an index into the nodes of the previous call, int64 [B, W]. 0 in the first call.
        visible: For a drafter with attention: the nodes that each node attends to, bool [B, W, F]. F counts the nodes
            of all calls so far, including this call. A node attends to its ancestors and itself. It also attends to the
            text and the pending token, which are not listed here.
        states: Hidden state of each node's parent, [B, W, H]. None if the drafter returns logits.
    """

    tokens: Tensor
    live: Tensor
    depth: int
    parents: Tensor
    visible: Tensor
    states: Tensor | None


Step = Callable[[Level], Tensor]
"""The drafter. It returns the logits [B, W, V] after each node or, if there is a head, the nodes' hidden states [B, W,
H]."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [B, W, H] -> logits [B, W, V]."""


def grow(step: Step, root: Tensor, config: TreeConfig, head: Head | None = None) -> CandidateTree:
    """Grow trees of the most likely candidates (EAGLE-2, arXiv 2406.16858), for `verify_greedy` and `verify_sampling`.

    On each level, the `branch` best nodes get their `branch` most likely children. In the end, the `max_nodes` best
    nodes of all levels are kept, except nodes whose path is less likely than `config.confidence`. Tokens with a logit
    of NaN or infinity are never proposed.

    Args:
        step: The drafter. If there is a head, it receives the hidden state of each node's parent, which EAGLE heads
            need.
        root: The drafter's logits [B, V] after the pending token. If there is a head, the hidden state [B, H] from
            which it computes these logits.
        config: Size of the trees.
        head: Maps hidden states to logits. None if the drafter returns logits.

    Returns:
        The trees. `broken` reports NaN and +inf in the logits.

    Raises:
        InvalidOption: If a shape is not valid.
    """
    expect("root", root, "float", "B", "H" if head else "V")
    width = min(config.max_nodes, config.branch + (config.depth - 1) * config.branch**2)
    return _LevelGrowth(step, root, head, config, [Sampler()] * len(root)).trees(width)


def sample(
    step: Step,
    root: Tensor,
    config: TreeConfig,
    head: Head | None = None,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[CandidateTree, Tensor]:
    """Draw candidates from the drafter, for `verify_rejection`.

    Siblings are drawn without replacement (Gumbel top-k, as in arXiv 2402.14160) from q[b, r], the softmax of the
    logits after row r at the temperature. `config` fixes the shape of the tree in advance. Every drawn node is kept,
    because a selection by tokens would distort q. A node whose path is less likely than `confidence` is kept too, but
    gets no children. At temperature 0, a request gets the tree of `grow`, and its rows of q are 0.

    Args:
        step: See `grow`.
        root: See `grow`.
        config: Size of the trees.
        head: See `grow`.
        temperature: A number or a tensor [B].
        generator: Source of the seed for all draws.

    Returns:
        The trees, and q, float [B, T, V].

    Raises:
        InvalidOption: If a shape or temperature is not valid.
    """
    expect("root", root, "float", "B", "H" if head else "V")
    heat = temperatures(temperature, len(root))
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else None))
    samplers = [Sampler(t, noise=Noise(seed, b), rule="rejection") for b, t in enumerate(heat)]
    tree = _LevelGrowth(step, root, head, config, samplers).trees(len(places(config.budget)))
    vocab = (head(root[:, None]) if head else root).shape[-1]
    q = torch.zeros(len(root), tree.tokens.shape[1] + 1, vocab, dtype=tree.scores.dtype)
    for b, draft in enumerate(tree.drafts):
        for row, p in draft.q.items():
            q[b, row] = p
    return tree, q.to(root.device)


def from_heads(logits: Tensor, config: TreeConfig) -> CandidateTree:
    """Grow trees from heads whose guesses are independent of each other (Medusa, arXiv 2401.10774).

    Args:
        logits: [B, K, V]. Head d guesses the token at depth d + 1.
        config: Size of the trees.

    Raises:
        InvalidOption: If a shape is not valid or config.depth > K.
    """
    _check_heads(logits, config.depth)
    return grow(lambda level: logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1), logits[:, 0], config)


def from_choices(logits: Tensor, choices: Sequence[Sequence[int]]) -> CandidateTree:
    """Build trees with a fixed shape from independent heads, as in Medusa (arXiv 2401.10774).

    Nodes are omitted if their path contains a token with a logit of NaN or infinity.

    Args:
        logits: [B, K, V]. Head d guesses the token at depth d + 1.
        choices: Paths of ranks. The choice (0, 2) means the best token of head 0, followed by the third best token of
            head 1. The prefixes of each choice are included.

    Raises:
        InvalidOption: If a choice is empty, or exceeds the number of heads or the vocabulary.
    """
    whole = all(type(rank) is int and rank >= 0 for choice in choices for rank in choice)
    require(
        whole and any(choices), f"choices must be tuples of ranks >= 0, got {choices!r}", "Use 0 for the best token"
    )
    branch, depth = 1 + max(max(choice) for choice in choices if choice), max(map(len, choices))
    _check_heads(logits, depth)
    vocab = logits.shape[-1]
    require(branch <= vocab, f"ranks must be < {vocab} (the vocabulary), got {branch - 1}", "Correct the choices")
    nodes = len(from_paths(choices).tokens)
    tree = fixed_tree(DraftBudget(nodes, depth, branch), tuple(tuple(choice) for choice in choices if choice), False)
    rows, bad = _clean(logits[:, :depth])
    drafts, log_probs = [], []
    for heads in rows:
        ranked = Sampler().rank(Prefix(), heads, [()] * depth, branch)
        draft = tree.draft(ranked)
        scores = [dict(zip(best.tokens, best.scores, strict=True)) for best in ranked]
        drafts.append(draft)
        log_probs.append([scores[d - 1][t] for d, t in zip(depths(draft.parents)[1:], draft.tokens, strict=True)])
    return pack_trees(drafts, log_probs, nodes, rows.to(logits.device), [any(row) for row in bad], depth, nodes)


def cartesian(*widths: int) -> list[tuple[int, ...]]:
    """Return the choices of a full tree: all combinations of the `widths[d]` best tokens of head d."""
    return list(product(*map(range, widths)))


class _LevelGrowth:
    """The growing trees of a batch. It translates between `grow_trees`, which handles each request separately, and the
    caller's drafter, which works on padded levels."""

    def __init__(
        self, step: Step, root: Tensor, head: Head | None, config: TreeConfig, samplers: Sequence[Sampler]
    ) -> None:
        self._step, self._head, self._config = step, head, config
        self._floors = config.floors(len(root))
        asks = [Ask(b, Prefix(), config.budget, sampler) for b, sampler in enumerate(samplers)]
        self._growths = [TreeGrowth.begin(ask, ask.budget, min_probability=0.0) for ask in asks]
        self._broken = [False] * len(root)
        self._depth = 0
        # Of the last level: the drafter's result [B, W, ...], the visibility [B, W, F], and the index of each node
        # among the W.
        self._out = root[:, None]
        self._visible = torch.zeros(len(root), 1, 0, dtype=torch.bool, device=root.device)
        self._places: list[dict[int, int]] = [{} for _ in asks]

    def trees(self, width: int) -> CandidateTree:
        """Grow the trees and return them, padded to `width` nodes."""
        grow_trees(
            self._growths,
            lambda growths: self._read(growths, self._out),
            self._level,
            lambda growth, *row: growth.ask.rank(*row),
        )
        drafts, log_probs = [], []
        for growth, floor in zip(self._growths, self._floors, strict=True):
            nodes, scores = growth.nodes, _path_scores(growth.nodes)
            if isinstance(nodes, ScoredTree):
                # The best nodes are kept, so a smaller budget drops exactly the nodes below the floor.
                likely = sum(score >= floor for score in scores)
                nodes.budget = replace(nodes.budget, nodes=min(nodes.budget.nodes, likely))
            above = [0.0 if parent == ROOT else scores[parent] for parent in nodes.parents]
            drafts.append(nodes.draft())
            log_probs.append([scores[node] - above[node] for node in nodes.remaining(())])
        like = widen(self._out[:0])
        return pack_trees(drafts, log_probs, width, like, self._broken, self._config.depth, self._config.branch)

    def _level(self, growths: Sequence[TreeGrowth]) -> list[Tensor]:
        self._depth += 1
        for growth in growths:
            scores, floor = _path_scores(growth.nodes), self._floors[growth.ask.slot]
            growth.chosen = [node for node in growth.chosen if scores[node] >= floor]
        if not any(growth.chosen for growth in growths):
            return [self._out.new_empty(0, 0)] * len(growths)
        return self._read(growths, self._step(self._pack(growths)))

    def _pack(self, growths: Sequence[TreeGrowth]) -> Level:
        """Pack the chosen nodes of these trees, padded to a width that depends only on the configuration."""
        batch, device = len(self._growths), self._out.device
        drawn = sum(len(place) == self._depth for place in shape(self._config.budget))
        width = max(drawn if growth.ask.draws else self._config.branch for growth in self._growths)
        tokens, parents, live = ([[0] * width for _ in range(batch)] for _ in range(3))
        for growth in growths:
            b, nodes, before = growth.ask.slot, growth.nodes, self._places[growth.ask.slot]
            self._places[b] = {node: place for place, node in enumerate(growth.chosen)}
            for place, node in enumerate(growth.chosen):
                tokens[b][place], live[b][place] = nodes.tokens[node], 1
                parents[b][place] = before.get(nodes.parents[node], 0)
        above = torch.tensor(parents, device=device)
        itself = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
        self._visible = torch.cat([self._visible.take_along_dim(above[..., None], 1), itself], 2)
        states = self._out.take_along_dim(above[..., None], 1) if self._head else None
        live_mask = torch.tensor(live, dtype=torch.bool, device=device)
        return Level(torch.tensor(tokens, device=device), live_mask, self._depth, above, self._visible, states)

    def _read(self, growths: Sequence[TreeGrowth], out: Tensor) -> list[Tensor]:
        """Return the logits [len(chosen), V] of each tree, taken from the drafter's result [B, W, ...]."""
        logits = self._head(out) if self._head else out
        expect("the drafter's logits", logits, "float", *self._visible.shape[:2], "V")
        branch, vocab = self._config.branch, logits.shape[-1]
        require(branch <= vocab, f"branch must be <= {vocab} (the draft vocabulary), got {branch}", "Lower it")
        self._out = out
        rows, bad = _clean(logits)
        for growth in growths:
            self._broken[growth.ask.slot] |= any(bad[growth.ask.slot][: len(growth.chosen)])
        return [rows[growth.ask.slot, : len(growth.chosen)] for growth in growths]


def _path_scores(nodes: DraftTree) -> Sequence[float]:
    """Return the drafter's log-probability of the path to each node."""
    if isinstance(nodes, ScoredTree):
        return nodes.scores
    scores: list[float] = []
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        p = float(nodes.q[parent][token])
        scores.append((0.0 if parent == ROOT else scores[parent]) + (math.log(p) if p else -math.inf))
    return scores


def _clean(logits: Tensor) -> tuple[Tensor, list[list[bool]]]:
    """Move logits [B, W, V] to the host, and replace NaN and +inf with -inf. Return the logits, and True for each row
    that contained NaN or +inf."""
    wide = widen(logits).cpu()
    bad = wide.isnan() | (wide == torch.inf)
    return wide.masked_fill(bad, -torch.inf), bad.any(-1).tolist()


def _check_heads(logits: Tensor, depth: int) -> None:
    expect("the heads' logits", logits, "float", "B", "K", "V")
    require(depth <= logits.shape[1], f"depth must be <= {logits.shape[1]} (the heads), got {depth}", "Lower the depth")
