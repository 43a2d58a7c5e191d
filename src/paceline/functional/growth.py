"""Candidate trees from a drafter's logits or hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from paceline.functional.candidates import CandidateTree, TreeConfig, require, topk
from paceline.functional.draws import gumbel_like, log_softmax, temperatures
from paceline.functional.levels import Head, Step, clean, grow_levels
from paceline.functional.nodes import NodeBatch
from paceline.verify.tree import depths, from_paths


def grow(step: Step, root: Tensor, config: TreeConfig, head: Head | None = None) -> CandidateTree:
    """The likeliest candidates: of each level the best `branch` nodes get their `branch` likeliest children, and of
    all that grew the best `max_nodes` are kept (EAGLE-2, arXiv 2406.16858).

    root: the drafter's logits [B, V] after the pending token; with `head`, the hidden state [B, H] behind them. With
    a head, `step` gets the state of each node's parent, as EAGLE heads need it, and early exits do not mind it.
    A node whose path is less likely than `config.confidence` is left out. Tokens with a logit of NaN or infinity are
    never proposed; NaN and +inf are reported in `broken`. Made for `verify_greedy` and `verify_sampling`. Raises
    `InvalidOption`.
    """
    most = config.branch + (config.depth - 1) * config.branch**2
    growth = grow_levels(step, root, head, config, lambda logits: _likeliest(logits, config.branch), most)
    return growth.tree((growth.scores > -torch.inf) & (growth.scores >= growth.floor))[0]


def sample(
    step: Step,
    root: Tensor,
    config: TreeConfig,
    head: Head | None = None,
    *,
    temperature: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[CandidateTree, Tensor]:
    """Candidates drawn from the drafter, for `verify_rejection`: the tree and the true q, float [B, T, V].

    Siblings are drawn without replacement (Gumbel top-k, as in arXiv 2402.14160) from q[b, r], the softmax of the
    logits after row r at `temperature` (a number, or [B]). Every drawn node is kept, because leaving one out for what
    it is would bend q: `max_nodes` only ends the growth, and a node below `confidence` stays but gets no children.
    Otherwise as `grow`.
    """
    heat = temperatures(temperature, root)
    q: list[Tensor] = []

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = log_softmax(logits.masked_fill(logits.isnan(), -torch.inf), heat)
        log_q = log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        q.append(log_q.exp())
        tokens = topk(log_q + gumbel_like(log_q, generator), config.branch).indices
        return tokens, log_q.gather(-1, tokens)

    growth = grow_levels(step, root, head, config, draw, config.max_nodes)
    tree, row_of = growth.tree(growth.scores > -torch.inf)
    return tree, growth.by_row(q, row_of, tree.tokens.shape[1] + 1)


def from_heads(logits: Tensor, config: TreeConfig) -> CandidateTree:
    """`grow` for heads that all speak at once, without seeing each other (Medusa, arXiv 2401.10774).

    logits: [B, K, V], head d for the token at depth d + 1. Raises `InvalidOption`, also where config.depth > K.
    """
    _check_heads(logits, config.depth)
    return grow(lambda level: logits[:, level.depth, None].expand(-1, level.tokens.shape[1], -1), logits[:, 0], config)


def from_choices(logits: Tensor, choices: Sequence[Sequence[int]]) -> CandidateTree:
    """A tree of one fixed shape for all requests, as Medusa has it (arXiv 2401.10774): the choice (0, 2) is the best
    token of head 0 and then the third of head 1. Prefixes count as chosen.

    logits: [B, K, V], head d for the token at depth d + 1. A request lacks the nodes whose path holds a token of NaN
    or infinite logit. Raises `InvalidOption`.
    """
    whole = all(type(rank) is int and rank >= 0 for choice in choices for rank in choice)
    require(whole and any(choices), f"choices={choices!r} name no tokens", "Give tuples of ranks, 0 for the best")
    deepest = max(map(len, choices))
    _check_heads(logits, deepest)
    shape = from_paths(choices)
    used = clean(logits[:, :deepest])
    tokens, log_probs = _likeliest(used, max(shape.tokens) + 1)
    ranks, parents, below = torch.tensor([shape.tokens, shape.parents, depths(shape.parents)[1:]], device=logits.device)
    chosen = log_probs[:, below - 1, ranks]
    nodes = NodeBatch(
        tokens=tokens[:, below - 1, ranks],
        parents=parents.expand_as(chosen),
        depths=below.expand_as(chosen),
        log_probs=chosen,
        scores=_sums(chosen, shape.parents),
    )
    broken = used.isnan().flatten(1).any(1)
    return nodes.keep(nodes.scores > -torch.inf, len(ranks), len(ranks), deepest, broken)[0]


def cartesian(*widths: int) -> list[tuple[int, ...]]:
    """The choices of a full tree: every combination of the `widths[d]` best of head d."""
    return list(product(*map(range, widths)))


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of [B, W, V] and their log-probabilities. NaN and -inf have none: -inf."""
    found = topk(logits, count)
    mass = logits.masked_fill(logits.isnan(), -torch.inf).logsumexp(-1, keepdim=True)
    # Should a sum round to less than its largest part, a child must still not score above its parent.
    log_probs = (found.values - mass).clamp_(max=0.0)
    return found.indices, log_probs.where(found.values > -torch.inf, -torch.inf)


def _sums(log_probs: Tensor, parents: Sequence[int]) -> Tensor:
    """[B, N], each node's own and its ancestors' together, where all have the same `parents`."""
    sums = [torch.zeros_like(log_probs[:, 0])]
    for node, parent in enumerate(parents):
        sums.append(sums[parent] + log_probs[:, node])
    return torch.stack(sums[1:], 1)


def _check_heads(logits: Tensor, depth: int) -> None:
    require(
        logits.ndim == 3 and logits.is_floating_point() and 1 <= depth <= logits.shape[1],
        f"{logits.dtype} logits {[*logits.shape]} do not reach depth {depth}",
        "Give floats [B, K, V], one head per depth",
    )
