"""Acceptance rules. Pure functions: no I/O, no state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling.sampler import Prefix, RuleName, Sampler, not_finite
from paceline.types import Draft, Guarantee, Verdict
from paceline.verify.rejection import Chance, RoundChance, Shaped, block_walk, rejection_walk

Rule = Callable[[Draft, Tensor, Sampler, Prefix], Verdict]
"""(draft, logits [T, V] of the pending token and the draft, sampler, prefix of row 0) -> verdict."""

Choose = Callable[[int, Sequence[int]], int]
"""(row, drafted tokens that lead to it) -> the target's next token."""


def match(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
    """Walk down the tree: at each visited row the target chooses as it would alone, and the child with that token is
    next.

    Only visited rows are shaped and checked. The tokens are those of plain decoding with the same `sampler`, whatever
    was drafted. Raises `NonFiniteLogits`.
    """
    if sampler.greedy and not sampler.processors and logits.device.type != "cpu":
        return walk(draft, _greedy(logits, len(prefix)))
    return walk(draft, lambda row, path: sampler.choose(prefix.after(path), logits[row]))


def _distributed(walk: Callable[[Draft, Shaped, Chance], Verdict]) -> Rule:
    """Return the rule that keeps the target's distribution, not its text, by this walk.

    Draws come from the sampler's noise: the same seed and drafter give the same text, another drafter another one. A
    drafter must not use that noise itself, except as `Sampler.rank` does. The rule raises `NonFiniteLogits`, and
    `InvalidOption` for an invalid q.
    """

    def rule(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
        def shaped(row: int, path: Sequence[int]) -> Tensor:
            return sampler.distribution(prefix.after(path), logits[row])

        return walk(draft, shaped, RoundChance(sampler.noise, len(prefix)))

    return rule


def typical(
    draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix, epsilon: float = 0.09, delta: float = 0.3
) -> Verdict:
    """Keep the longest drafted path of plausible tokens: p > min(epsilon, delta * exp(-entropy)). Lossy.

    p is the target's distribution (processors, temperature, cuts); of equally long paths the likelier one wins. The
    likeliest token follows, so that a round always yields one. The defaults are the authors'. Source: typical
    acceptance of Medusa, arXiv 2401.10774. Raises `NonFiniteLogits`.
    """
    kept = {0: _TypicalRow((), (), 0.0, sampler.distribution(prefix, logits[0]))}
    for row, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1):
        above = kept.get(parent)
        if above and above.plausible(token, epsilon, delta):
            path = (*above.tokens, token)
            score = above.score + math.log(float(above.p[token]))
            p = sampler.distribution(prefix.after(path), logits[row])
            kept[row] = _TypicalRow((*above.path, row), path, score, p)
    best = max(kept.values(), key=lambda k: (len(k.path), k.score))
    return Verdict(best.path, (*best.tokens, int(best.p.argmax())))


@dataclass(frozen=True, slots=True)
class _TypicalRow:
    """A row that `typical` may keep: its path, the path's log-probability, and the distribution after it."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    score: float
    p: Tensor

    def plausible(self, token: int, epsilon: float, delta: float) -> bool:
        entropy = float(torch.special.entr(self.p).sum())
        return float(self.p[token]) > min(epsilon, delta * math.exp(-entropy))


RULES: dict[RuleName, Rule] = {
    "match": match,
    "rejection": _distributed(rejection_walk),
    "block": _distributed(block_walk),
    "typical": typical,
}
"""Acceptance rules. A greedy sampler has the rule match."""


def text_guarantee(sampler: Sampler, guarantee: Guarantee) -> Guarantee:
    """Return the guarantee of a reply's text. `guarantee`: the machine's (`self_check.guarantee`)."""
    if sampler.draws:
        return "distribution"
    return "lossy" if sampler.rule == "typical" else guarantee


def walk(draft: Draft, choose: Choose) -> Verdict:
    """Follow the target's choices down the tree until one was not drafted."""
    children = {edge: node + 1 for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens: list[int] = []
    row: int | None = 0
    while row is not None:
        tokens.append(choose(row, tokens))
        row = children.get((row, tokens[-1]))
        if row is not None:
            path.append(row)
    return Verdict(tuple(path), tuple(tokens))


def _greedy(logits: Tensor, position: int) -> Choose:
    """Return a greedy choice, ties to the lowest id: one reduction and one transfer for all rows."""
    best = logits.max(-1)
    # One tensor, so that the device is synchronised once. Ids are below 2^24, which float32 holds.
    values, tokens = torch.stack([best.values, best.indices.to(logits.dtype)]).tolist()

    def choose(row: int, path: Sequence[int]) -> int:
        if not math.isfinite(values[row]):
            raise not_finite(position + len(path))
        return int(tokens[row])

    return choose
