"""Candidate trees from a drafter's logits or hidden states: `drafters/growth.py` on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, Chosen, Growth, Nodes, grow_trees
from paceline.drafters.independent import fixed
from paceline.functional.candidates import CandidateTree, TreeConfig, expect, pack_trees, require, temperatures, widen
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import DraftBudget
from paceline.verify.tree import depths, from_paths, places, shape


@dataclass(frozen=True, slots=True)
class Level:
    """The W nodes per request that a drafter is to continue. All stand at position `lengths + depth`.

    tokens: int64 [B, W]. live: bool [B, W]; nodes that are not live are token 0, and their logits are ignored.
    parents: int64 [B, W], each node's parent as an index into the last call's nodes (0 in the first call).
    visible: bool [B, W, F], which of the F nodes of all calls so far (this one's last) each node sees: its ancestors
    and itself, for a drafter that attends to what it was fed, besides the text and the pending token.
    states: [B, W, H], the hidden state of each node's parent; None where the drafter gives logits.
    """

    tokens: Tensor
    live: Tensor
    depth: int
    parents: Tensor
    visible: Tensor
    states: Tensor | None


Step = Callable[[Level], Tensor]
"""The drafter: logits [B, W, V] of what follows each node; or, with a head, each node's own hidden state [B, W, H]."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [B, W, H] to logits [B, W, V]."""


def grow(step: Step, root: Tensor, config: TreeConfig, head: Head | None = None) -> CandidateTree:
    """Return the likeliest candidates: of each level the best `branch` nodes get their `branch` likeliest children,
    and of all that grew the best `max_nodes` are kept (EAGLE-2, arXiv 2406.16858).

    root: the drafter's logits [B, V] after the pending token; with `head`, the hidden state [B, H] behind them. With
    a head, `step` gets the state of each node's parent, as EAGLE heads need it and early exits can ignore.
    A node whose path is less likely than `config.confidence` is left out. Tokens with a logit of NaN or infinity are
    never proposed; NaN and +inf are reported in `broken`. Made for `verify_greedy` and `verify_sampling`. Raises
    `InvalidOption`.
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
    """Return candidates drawn from the drafter, for `verify_rejection`, and the true q, float [B, T, V].

    Siblings are drawn without replacement (Gumbel top-k, as in arXiv 2402.14160) from q[b, r], the softmax of the
    logits after row r at `temperature` (a number, or [B]). The tree's shape is fixed beforehand by `config`, and every
    drawn node is kept, because choosing by what was drawn would bend q; a node below `confidence` stays but gets no
    children. At temperature 0 a request gets the tree of `grow`, and rows of q that are 0. Otherwise as `grow`.
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
    """`grow` for heads that all guess at once, independently of each other (Medusa, arXiv 2401.10774).

    logits: [B, K, V], head d for the token at depth d + 1. Raises `InvalidOption`, also where config.depth > K.
    """
    _check_heads(logits, config.depth)
    return grow(lambda level: logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1), logits[:, 0], config)


def from_choices(logits: Tensor, choices: Sequence[Sequence[int]]) -> CandidateTree:
    """Return trees of one fixed shape, as in Medusa (arXiv 2401.10774): the choice (0, 2) is the best token of head 0
    and then the third of head 1. Prefixes count as chosen.

    logits: [B, K, V], head d for the token at depth d + 1. A request lacks the nodes whose path holds a token of NaN
    or infinite logit. Raises `InvalidOption`.
    """
    whole = all(type(rank) is int and rank >= 0 for choice in choices for rank in choice)
    require(whole and any(choices), f"choices={choices!r} name no tokens", "Give tuples of ranks, 0 for the best")
    branch, depth = 1 + max(max(choice) for choice in choices if choice), max(map(len, choices))
    _check_heads(logits, depth)
    require(branch <= logits.shape[-1], f"a choice has rank {branch - 1}", f"Give ranks below {logits.shape[-1]}")
    nodes = len(from_paths(choices).tokens)
    tree = fixed(DraftBudget(nodes, depth, branch), tuple(tuple(choice) for choice in choices if choice), False)
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
    """Return the choices of a full tree: every combination of the `widths[d]` best of head d."""
    return list(product(*map(range, widths)))


class _LevelGrowth:
    """The growing trees of a batch: `grow_trees` sees single requests, the caller's drafter whole padded levels."""

    def __init__(
        self, step: Step, root: Tensor, head: Head | None, config: TreeConfig, samplers: Sequence[Sampler]
    ) -> None:
        self._step, self._head, self._config = step, head, config
        self._floors = config.floors(len(root))
        asks = [Ask(b, Prefix(), config.budget, sampler) for b, sampler in enumerate(samplers)]
        self._growths = [Growth.begin(ask, ask.budget, least=0.0) for ask in asks]
        self._broken = [False] * len(root)
        self._depth = 0
        # The last level: the drafter's answer [B, W, ...], what its nodes see [B, W, F], and each node's place in W.
        self._out = root[:, None]
        self._visible = torch.zeros(len(root), 1, 0, dtype=torch.bool, device=root.device)
        self._places: list[dict[int, int]] = [{} for _ in asks]

    def trees(self, width: int) -> CandidateTree:
        """Grow the trees and return them, padded to `width` nodes."""
        grow_trees(self._growths, self._roots, self._level, lambda growth, *row: growth.ask.rank(*row))
        drafts, log_probs = [], []
        for growth, floor in zip(self._growths, self._floors, strict=True):
            nodes, scores = growth.nodes, _path_scores(growth.nodes)
            if isinstance(nodes, Chosen):
                # The best nodes are kept, so the budget leaves out those below the floor.
                likely = sum(score >= floor for score in scores)
                nodes.budget = replace(nodes.budget, nodes=min(nodes.budget.nodes, likely))
            above = [0.0 if parent == ROOT else scores[parent] for parent in nodes.parents]
            drafts.append(nodes.draft())
            log_probs.append([scores[node] - above[node] for node in nodes.others(())])
        like = widen(self._out[:0])
        return pack_trees(drafts, log_probs, width, like, self._broken, self._config.depth, self._config.branch)

    def _roots(self, growths: Sequence[Growth]) -> list[Tensor]:
        return self._read(growths, self._out)

    def _level(self, growths: Sequence[Growth]) -> list[Tensor]:
        self._depth += 1
        for growth in growths:
            scores, floor = _path_scores(growth.nodes), self._floors[growth.ask.slot]
            growth.chosen = [node for node in growth.chosen if scores[node] >= floor]
        if not any(growth.chosen for growth in growths):
            return [self._out.new_empty(0, 0)] * len(growths)
        return self._read(growths, self._step(self._pack(growths)))

    def _pack(self, growths: Sequence[Growth]) -> Level:
        """Return the chosen nodes of these trees, padded to a width that depends on the configuration alone."""
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

    def _read(self, growths: Sequence[Growth], out: Tensor) -> list[Tensor]:
        """Return the logits [len(chosen), V] of each tree from the drafter's answer [B, W, ...]."""
        logits = self._head(out) if self._head else out
        expect("the drafter's logits", logits, "float", *self._visible.shape[:2], "V")
        branch, vocab = self._config.branch, logits.shape[-1]
        require(branch <= vocab, f"branch must be <= {vocab} (the draft's vocabulary), got {branch}", "Lower it")
        self._out = out
        rows, bad = _clean(logits)
        for growth in growths:
            self._broken[growth.ask.slot] |= any(bad[growth.ask.slot][: len(growth.chosen)])
        return [rows[growth.ask.slot, : len(growth.chosen)] for growth in growths]


def _path_scores(nodes: Nodes) -> Sequence[float]:
    """Return the draft's log-probability of the path to each node."""
    if isinstance(nodes, Chosen):
        return nodes.scores
    scores: list[float] = []
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        p = float(nodes.q[parent][token])
        scores.append((0.0 if parent == ROOT else scores[parent]) + (math.log(p) if p else -math.inf))
    return scores


def _clean(logits: Tensor) -> tuple[Tensor, list[list[bool]]]:
    """Return logits [B, W, V] on the host, NaN and +inf replaced by -inf, and which rows held these."""
    wide = widen(logits).cpu()
    bad = wide.isnan() | (wide == torch.inf)
    return wide.masked_fill(bad, -torch.inf), bad.any(-1).tolist()


def _check_heads(logits: Tensor, depth: int) -> None:
    expect("the heads' logits", logits, "float", "B", "K", "V")
    require(depth <= logits.shape[1], f"{logits.shape[1]} heads do not reach depth {depth}", "Lower the depth")
