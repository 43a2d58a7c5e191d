"""Which candidates stand, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.functional.candidates import NONE, CandidateTree, require, widen
from paceline.functional.draws import draw, gumbel_like, log_softmax, temperatures


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one round gives each request.

    tokens: int64 [B, D + 1], the accepted candidates and then the target's own token (correction or bonus), padded
    with -1. The last is the next pending token. counts: int64 [B], how many.
    path: int64 [B, D], the rows whose keys stay besides row 0, padded with -1: one fewer than tokens.
    broken: bool [B], whether a visited row of the target's logits had no finite maximum. Such a request ends before
    that row's token: what was accepted above stands, and if that is nothing, nothing changes.
    """

    tokens: Tensor
    counts: Tensor
    path: Tensor
    broken: Tensor

    def cut(self, limit: Tensor) -> Accepted:
        """The first `limit` [B] tokens at most, as an end of text or a length may ask; 0 leaves a request as it was."""
        require(limit.shape == self.counts.shape, f"limit has shape {[*limit.shape]}", "Give a tensor [B]")
        return _accepted(self.tokens, self.path, self.counts.minimum(limit).clamp(min=0), self.broken)


Decide = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(logits [B, V] of the rows visited, those rows [B], depth) -> the token after each, and its row in the tree or 0."""


def verify_greedy(tree: CandidateTree, logits: Tensor) -> Accepted:
    """The target's likeliest tokens, ties to the lowest id: the text of plain greedy decoding.

    logits: [B, T, V], the target's, row by row. Raises `InvalidOption`.
    """

    def decide(here: Tensor, row: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        token = here.max(-1).indices
        return token, _child(tree, row, token)

    return _walk(tree, _checked(tree, logits), decide)


def verify_sampling(
    tree: CandidateTree,
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """At each visited row the target draws its own token, argmax(log p + noise), and the walk goes on where a
    candidate carries it (Paceline's rule `match`): the distribution is the target's, whatever was drafted.

    logits: [B, T, V]; cut tokens (top-k, top-p) by setting them to -inf. temperature: a number or [B], 0 for greedy.
    noise: standard Gumbel [B, D + 1, V], [:, d] for the token d + 1 after the pending one; with noise that belongs to
    the place in the text (`paceline.sampling.noise`) the text is that of plain decoding with it. Without: drawn with
    `generator`. Raises `InvalidOption`.
    """
    logits = _checked(tree, logits)
    heat = temperatures(temperature, logits)
    _check_chance(noise, (len(logits), tree.max_depth + 1, logits.shape[2]), generator)

    def decide(here: Tensor, row: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        log_p = log_softmax(here, heat)
        token = (log_p + (gumbel_like(log_p, generator) if noise is None else noise[:, depth])).max(-1).indices
        return token, _child(tree, row, token)

    return _walk(tree, logits, decide)


def verify_rejection(
    tree: CandidateTree,
    logits: Tensor,
    q: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Accept a candidate x with probability min(1, p(x) / q(x)), else try its next sibling against what is left of p
    and of q: p becomes (p - q)+, q loses x. The distribution is the target's, exactly, and more is accepted than by
    `verify_sampling` for most drafts. Chains: arXiv 2211.17192. Siblings without replacement: arXiv 2402.14160.

    tree: siblings in the order in which they were drawn from q without replacement, as `sample` makes them. What
    `grow` picks was not drawn: it has no q. q: [B, T, V], the probabilities that row r's children were drawn from.
    A row of q that is not finite counts as none, and so does a candidate of probability 0: it is passed over.
    logits: [B, T, V]. temperature: the target's, a number or [B], 0 for greedy. uniforms: [B, D + 1, S + 1] in [0, 1)
    for S = tree.max_branch, one for each sibling and the last for the target's own token; they must not be those that
    drew the candidates. Without: drawn with `generator`. Raises `InvalidOption`.
    """
    logits = _checked(tree, logits)
    heat = temperatures(temperature, logits)
    require(q.shape == logits.shape, f"q has shape {[*q.shape]} and logits {[*logits.shape]}", "Give q as [B, T, V]")
    _check_chance(uniforms, (len(logits), tree.max_depth + 1, tree.max_branch + 1), generator)

    def decide(here: Tensor, row: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        chance = here.new_empty(len(here), tree.max_branch + 1).uniform_(generator=generator)
        chance = chance if uniforms is None else uniforms[:, depth].to(here)
        return _reject(tree, row, log_softmax(here, heat).exp(), _row(q, row).to(here), chance)

    return _walk(tree, logits, decide)


def _reject(tree: CandidateTree, row: Tensor, p: Tensor, q: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """The token after `row` [B] and its row in the tree or 0, from p and q [B, V]."""
    q = q.where(q.isfinite().all(-1, keepdim=True), 0.0)
    siblings = tree.parents == row[:, None]
    order = siblings.cumsum(1)
    token, taken = torch.zeros_like(row), torch.zeros_like(row)
    for sibling in range(tree.max_branch):
        child = _row_number(siblings & (order == sibling + 1))
        x = torch.nn.functional.pad(tree.tokens, (1, 0)).gather(1, child[:, None]).clamp_(min=0)
        p_x, q_x = p.gather(1, x)[:, 0], q.gather(1, x)[:, 0]
        tried = (child > 0) & (taken == 0) & (q_x > 0)
        accept = tried & (chance[:, sibling] * q_x < p_x)
        token, taken = torch.where(accept, x[:, 0], token), torch.where(accept, child, taken)
        rejected = (tried & ~accept)[:, None]
        p = torch.where(rejected, _normal((p - q).clamp_(min=0), p), p)
        q = torch.where(rejected, _normal(q.scatter(1, x, 0.0), q.new_zeros(())), q)
    return torch.where(taken > 0, token, draw(p, chance[:, -1])), taken


def _walk(tree: CandidateTree, logits: Tensor, decide: Decide) -> Accepted:
    """From row 0 down, all requests together, as long as `decide` names a row of the tree."""
    row = torch.zeros_like(tree.counts)
    live = row == 0
    broken = ~live
    tokens, path = [], []
    for depth in range(tree.max_depth + 1):
        here = _row(logits, row)
        token, child = decide(here, row, depth)
        fine = here.amax(-1).isfinite()
        broken = broken | (live & ~fine)
        tokens.append(token.where(live & fine, NONE))
        live = live & fine & (child > 0)
        path.append(child.where(live, NONE))
        row = child.where(live, 0)
    all_tokens = torch.stack(tokens, 1)
    return _accepted(all_tokens, torch.stack(path, 1)[:, :-1], (all_tokens >= 0).sum(1), broken)


def _accepted(tokens: Tensor, path: Tensor, counts: Tensor, broken: Tensor) -> Accepted:
    """Everything cut to `counts` tokens and the rows before the last of them."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    return Accepted(
        tokens=tokens.where(column < counts[:, None], NONE),
        counts=counts,
        path=path.where(column[1:] < counts[:, None], NONE),
        broken=broken,
    )


def _child(tree: CandidateTree, row: Tensor, token: Tensor) -> Tensor:
    """The child of `row` [B] that carries `token` [B], as a row, or 0."""
    return _row_number((tree.parents == row[:, None]) & (tree.tokens == token[:, None]))


def _row_number(node: Tensor) -> Tensor:
    """The row of the one node that is marked in bool [B, N], or 0."""
    return (node * torch.arange(1, node.shape[1] + 1, device=node.device)).sum(1)


def _row(values: Tensor, row: Tensor) -> Tensor:
    """[B, T, V] at `row` [B]: [B, V]."""
    return values.gather(1, row[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def _normal(weights: Tensor, otherwise: Tensor) -> Tensor:
    """`weights` [B, V] over their sum; `otherwise` where nothing is left but rounding."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, otherwise)


def _checked(tree: CandidateTree, logits: Tensor) -> Tensor:
    batch, nodes = tree.tokens.shape
    require(
        logits.ndim == 3 and logits.shape[:2] == (batch, nodes + 1) and logits.is_floating_point(),
        f"the target's logits are {logits.dtype} {[*logits.shape]} for trees of {nodes} nodes, {batch} requests",
        "Give floats [B, N + 1, V]: row 0 is the pending token, node i is row i + 1",
    )
    return widen(logits)


def _check_chance(given: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
    require(given is None or generator is None, "two sources of chance are given", "Give numbers or a generator")
    require(
        given is None or given.shape == shape,
        f"the given noise has shape {[*given.shape] if given is not None else None}",
        f"This tree and vocabulary need {[*shape]}",
    )
