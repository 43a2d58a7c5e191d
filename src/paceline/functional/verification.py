"""Verification of a whole batch: the rules of `verify/` on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.functional.arguments import require, temperatures, widen
from paceline.functional.candidates import CandidateTree, padded
from paceline.types import Verdict
from paceline.verify.rejection import rejection_walk
from paceline.verify.rules import walk


@dataclass(frozen=True, slots=True)
class Accepted:
    """Result of one round for each request.

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
        """Return the first `limit` [B] tokens at most, for an end of text or a length; 0 leaves a request as it was."""
        require(limit.shape == self.counts.shape, f"limit has shape {[*limit.shape]}", "Give a tensor [B]")
        counts = self.counts.minimum(limit).clamp(min=0)
        column = torch.arange(self.tokens.shape[1], device=counts.device)
        return Accepted(
            tokens=self.tokens.where(column < counts[:, None], NONE),
            counts=counts,
            path=self.path.where(column[1:] < counts[:, None], NONE),
            broken=self.broken,
        )


def verify_greedy(tree: CandidateTree, logits: Tensor) -> Accepted:
    """Accept the target's likeliest tokens, ties to the lowest id: the text of plain greedy decoding.

    logits: [B, T, V], the target's, row by row. Raises `InvalidOption`.
    """
    return verify_sampling(tree, logits, temperature=0.0)


def verify_sampling(
    tree: CandidateTree,
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """At each visited row the target draws its own token, argmax(logits / temperature + noise), and the walk goes on
    where a candidate carries it (the rule `match`): the distribution is the target's, whatever was drafted.

    logits: [B, T, V]; cut tokens (top-k, top-p) by setting them to -inf. temperature: a number or [B], 0 for greedy.
    noise: standard Gumbel [B, D + 1, V], [:, d] for the token d + 1 after the pending one; with noise that belongs to
    the place in the text (`paceline.sampling.noise`) the text is that of plain decoding with it. Without: drawn with
    `generator`. Raises `InvalidOption`.
    """
    logits, heat = _checked(tree, logits, temperature)
    _check_noise(noise, (len(logits), tree.max_depth + 1, logits.shape[2]), generator)
    highest = _highest(logits)

    def chooser(b: int) -> Callable[[int, Sequence[int]], int]:
        def choose(row: int, path: Sequence[int]) -> int:
            if heat[b] == 0.0 or highest[b][row] == NONE:
                return highest[b][row]
            scores = logits[b, row] / heat[b]
            gumbel = _gumbel_like(scores, generator) if noise is None else noise[b, len(path)].to(scores)
            return int((scores + gumbel).argmax())

        return choose

    return _accepted(tree, [walk(draft, chooser(b)) for b, draft in enumerate(tree.drafts)])


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
    and of q (`verify.rejection.rejection_walk`). The distribution is the target's, exactly, and more is accepted than
    by `verify_sampling` for most drafts.

    tree: siblings in the order in which they were drawn from q without replacement, as `sample` makes them. q:
    [B, T, V], the probabilities that row r's children were drawn from. A child whose q is 0, or all children of a row
    of q that is not finite, count as chosen instead: all of q lies on them, and p(x) accepts.
    logits: [B, T, V]. temperature: the target's, a number or [B], 0 for greedy. uniforms: [B, D + 1, S + 1] in [0, 1)
    for S = tree.max_branch, one for each sibling and the last for the target's own token; they must not be those that
    drew the candidates. Without: drawn with `generator`. Raises `InvalidOption`.
    """
    logits, heat = _checked(tree, logits, temperature)
    require(q.shape == logits.shape, f"q has shape {[*q.shape]} and logits {[*logits.shape]}", "Give q as [B, T, V]")
    need = (len(logits), tree.max_depth + 1, tree.max_branch + 1)
    _check_noise(uniforms, need, generator)
    if uniforms is None:
        uniforms = torch.rand(need, dtype=torch.float64, generator=generator, device=generator and generator.device)
    highest, q = _highest(logits), widen(q)
    mass = q.sum(-1)
    drawn = (mass.isfinite() & (mass > 0)).tolist()
    verdicts = []
    for b, (draft, numbers) in enumerate(zip(tree.drafts, uniforms.tolist(), strict=True)):
        if heat[b] == 0.0:
            verdicts.append(walk(draft, lambda row, path, b=b: highest[b][row]))
            continue
        known = {row: (q[b, row] / mass[b, row]).cpu() for row in {*draft.parents} if drawn[b][row]}
        chance = _GivenChance(logits[b], heat[b], numbers)
        verdicts.append(rejection_walk(replace(draft, q=known), chance.shaped, chance))
    return _accepted(tree, verdicts)


class _GivenChance:
    """The target's distributions in one round of one request, and its draws (`verify.rejection.Chance`)."""

    def __init__(self, logits: Tensor, temperature: float, uniforms: list[list[float]]) -> None:
        self._logits, self._temperature, self._uniforms = logits, temperature, uniforms
        self._depth = self._tried = 0

    def shaped(self, row: int, path: Sequence[int]) -> Tensor:
        """Return p [V]: NaN for a row without a finite maximum, where nothing is accepted and the walk ends."""
        self._depth, self._tried = len(path), 0
        return (self._logits[row] / self._temperature).softmax(-1).cpu()

    def accept(self, probability: float) -> bool:
        self._tried += 1
        return self._uniforms[self._depth][self._tried - 1] < probability

    def token(self, p: Tensor) -> int:
        return NONE if bool(p.isnan().any()) else draw(p, self._uniforms[self._depth][-1])


def draw(p: Tensor, uniform: float) -> int:
    """Return the token at `uniform` of the sum of p [V], which need not be 1."""
    edges = p.cumsum(-1)
    token = int(torch.searchsorted(edges, uniform * edges[-1], right=True))
    # A uniform so near 1 that the product rounds to the sum itself.
    return token if token < len(p) else int(p.argmax())


def _highest(logits: Tensor) -> list[list[int]]:
    """Return the likeliest token after each row, or `NONE` where no maximum is finite: a walk ends there."""
    best = logits.max(-1)
    tokens: list[list[int]] = best.indices.where(best.values.isfinite(), NONE).tolist()
    return tokens


def _gumbel_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    waits = torch.empty_like(x).exponential_(generator=generator)
    return -waits.clamp_min_(torch.finfo(x.dtype).tiny).log_()


def _accepted(tree: CandidateTree, verdicts: Sequence[Verdict]) -> Accepted:
    """Return what these walks accepted, without the `NONE` that ends one at a broken row."""
    device, depth = tree.tokens.device, tree.max_depth
    broken = [verdict.tokens[-1] == NONE for verdict in verdicts]
    counts = [len(verdict.tokens) - end for verdict, end in zip(verdicts, broken, strict=True)]
    return Accepted(
        tokens=padded([verdict.tokens for verdict in verdicts], depth + 1, device),
        counts=torch.tensor(counts, device=device),
        path=padded([v.path[: max(0, n - 1)] for v, n in zip(verdicts, counts, strict=True)], depth, device),
        broken=torch.tensor(broken, device=device),
    )


def _checked(tree: CandidateTree, logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, list[float]]:
    batch, nodes = tree.tokens.shape
    require(
        logits.ndim == 3 and logits.shape[:2] == (batch, nodes + 1) and logits.is_floating_point(),
        f"the target's logits are {logits.dtype} {[*logits.shape]} for trees of {nodes} nodes, {batch} requests",
        "Give floats [B, N + 1, V]: row 0 is the pending token, node i is row i + 1",
    )
    return widen(logits), temperatures(temperature, batch)


def _check_noise(given: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
    require(given is None or generator is None, "both numbers and a generator are given", "Give one of them")
    require(
        given is None or given.shape == shape,
        f"the given noise has shape {[*given.shape] if given is not None else None}",
        f"This tree and vocabulary need {[*shape]}",
    )
