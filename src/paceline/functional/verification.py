"""Verification and commit of a whole batch: the rules of `verify/` on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.functional.candidates import CandidateTree, expect, padded, require, temperatures, widen
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
        expect("limit", limit, None, *self.counts.shape)
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
    best = _best(logits)

    def choose(b: int, row: int, path: Sequence[int]) -> int:
        if heat[b] == 0.0 or best[b][row] == NONE:
            return best[b][row]
        scores = logits[b, row] / heat[b]
        if noise is not None:
            return int((scores + noise[b, len(path)].to(scores)).argmax())
        waits = torch.empty_like(scores).exponential_(generator=generator)
        return int((scores - waits.clamp_min_(torch.finfo(waits.dtype).tiny).log_()).argmax())

    return _accepted(tree, [walk(draft, partial(choose, b)) for b, draft in enumerate(tree.drafts)])


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
    expect("q", q, None, *logits.shape)
    need = (len(logits), tree.max_depth + 1, tree.max_branch + 1)
    _check_noise(uniforms, need, generator)
    if uniforms is None:
        device = generator.device if generator else None
        uniforms = torch.rand(need, dtype=torch.float64, generator=generator, device=device)
    best, q = _best(logits), widen(q)
    mass = q.sum(-1)
    drawn = (mass.isfinite() & (mass > 0)).tolist()
    verdicts = []
    for b, (draft, numbers) in enumerate(zip(tree.drafts, uniforms.tolist(), strict=True)):
        if not heat[b]:
            verdicts.append(walk(draft, lambda row, path, after=best[b]: after[row]))  # type: ignore[misc]
            continue
        known = {row: (q[b, row] / mass[b, row]).cpu() for row in {*draft.parents} if drawn[b][row]}
        chance = _GivenChance(logits[b], heat[b], numbers)
        verdicts.append(rejection_walk(replace(draft, q=known), chance.shaped, chance))
    return _accepted(tree, verdicts)


def append(tokens: Tensor, lengths: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Return the token cache and the lengths after a round.

    tokens: int64 [B, L], the text of request b in `tokens[b, : lengths[b] + 1]`, the pending token last; the rest is
    overwritten. lengths: int64 [B].
    Returns new tokens [B, L'], padded with -1, and new lengths [B]. L' is L, or more if the longest text needs it,
    which takes a wait for the device.
    """
    expect("lengths", lengths, "int64", *accepted.counts.shape)
    expect("the token cache", tokens, "int64", len(lengths), "L")
    after = lengths + accepted.counts
    width = int(after.max()) + 1 if len(after) else 0
    text = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])), value=NONE)
    column = torch.arange(text.shape[1], device=text.device)
    new = column - lengths[:, None] - 1
    written = accepted.tokens.gather(1, new.clamp(0, accepted.tokens.shape[1] - 1))
    text = torch.where((new >= 0) & (new < accepted.counts[:, None]), written, text)
    return text.where(column <= after[:, None], NONE), after


def gather_kv_(cache: Tensor, lengths: Tensor, accepted: Accepted) -> Tensor:
    """Move the accepted rows' keys or values of one layer next to the committed text, in place, and return the cache.

    cache: [B, heads, L, D], where row r of request b was written to column `lengths[b] + r` (row 0 is in place
    already). lengths: int64 [B], those before `append`. Only the columns of the deepest path are copied; columns
    behind the new length are left, and overwritten by the next round.
    """
    expect("lengths", lengths, "int64", *accepted.counts.shape)
    expect("keys or values", cache, None, len(lengths), "heads", "L", "D")
    kept = accepted.path > 0
    place = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    shape = (-1, cache.shape[1], -1, cache.shape[3])
    # A padded step copies row 0 onto itself.
    old, new = (
        (lengths[:, None] + rows.where(kept, 0))[:, None, :, None].expand(shape)
        for rows in (accepted.path, place.expand_as(kept))
    )
    return cache.scatter_(2, new, cache.gather(2, old))


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


def _best(logits: Tensor) -> list[list[int]]:
    """Return the likeliest token after each row [B][T], `NONE` where no maximum is finite: a walk ends there."""
    best = logits.max(-1)
    tokens: list[list[int]] = best.indices.where(best.values.isfinite(), NONE).tolist()
    return tokens


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
    expect("the target's logits, of the pending token and then of each node", logits, "float", batch, nodes + 1, "V")
    largest = max((token for draft in tree.drafts for token in draft.tokens), default=0)
    require(
        largest < logits.shape[2],
        f"the tree holds token {largest}, and the logits are of {logits.shape[2]} tokens",
        "Draft from the target's vocabulary",
    )
    return widen(logits), temperatures(temperature, batch)


def _check_noise(given: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> None:
    if given is not None:
        require(generator is None, "both numbers and a generator are given", "Give one of them")
        expect("the given noise", given, None, *shape)
