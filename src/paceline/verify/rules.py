"""Acceptance rules. Pure functions: no I/O, no state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.sampling.sampler import Prefix, RuleName, Sampler, not_finite
from paceline.types import Draft, Guarantee, Verdict
from paceline.verify.rejection import Chance, RoundChance, Shaped, block_walk, rejection_walk

Rule = Callable[[Draft, Tensor, Sampler, Prefix], Verdict]
"""(draft, logits [T, V] of the pending token and the draft, sampler, prefix of row 0) -> verdict."""

Choose = Callable[[int, Sequence[int]], int | None]
"""(row, drafted tokens that lead to it) -> the target's next token; None where the row failed (`deferred`)."""

T = TypeVar("T")


def deferred(read: Callable[[int, Sequence[int]], T]) -> Callable[[int, Sequence[int]], T | None]:
    """Return `read` (row, drafted tokens that lead to it), but with None for a drafted row that raises.

    A walk ends above such a row, as if nothing had been drafted there. If the reply has ended by then (EOS, a stop
    string), plain decoding never reads the row. If not, the next round begins with it and raises the error, as plain
    decoding does. So a draft never decides whether a reply fails.
    """

    def attempt(row: int, path: Sequence[int]) -> T | None:
        try:
            return read(row, path)
        except Exception:
            if not path:
                raise
            return None

    return attempt


def match(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
    """Walk down the tree: at each visited row the target chooses as it would alone, and the child with that token is
    next.

    Only visited rows are shaped and checked. The tokens are those of plain decoding with the same `sampler`, whatever
    was drafted. Raises `NonFiniteLogits`, and what a processor raises at row 0; see `deferred` for other rows.
    """
    if sampler.greedy and not sampler.processors and logits.device.type != "cpu":
        return walk(draft, deferred(_greedy(logits, len(prefix))))
    return walk(draft, deferred(lambda row, path: sampler.choose(prefix.after(path), logits[row])))


def _distributed(walk: Callable[[Draft, Shaped, Chance], Verdict]) -> Rule:
    """Return the rule that keeps the target's distribution, not its text, by this walk.

    Draws come from the sampler's noise: the same seed and drafter give the same text, another drafter another one. A
    drafter must not use that noise itself, except as `Sampler.rank` does. The rule raises `NonFiniteLogits`, and
    `InvalidOption` for an invalid q.
    """

    def rule(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
        def shaped(row: int, path: Sequence[int]) -> Tensor:
            return sampler.distribution(prefix.after(path), logits[row])

        return walk(draft, deferred(shaped), RoundChance(sampler.noise, len(prefix)))

    return rule


def typical(
    draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix, epsilon: float = 0.09, delta: float = 0.3
) -> Verdict:
    """Keep the longest drafted path of plausible tokens: p > min(epsilon, delta * exp(-entropy)). Lossy.

    p is the target's distribution (processors, temperature, cuts); of equally long paths the likelier one wins. The
    likeliest token follows, so that a round always yields one. The defaults are the authors'. Source: typical
    acceptance of Medusa, arXiv 2401.10774. Raises `NonFiniteLogits`.
    """
    shaped = deferred(lambda row, path: sampler.distribution(prefix.after(path), logits[row]))
    kept = {0: _TypicalRow((), (), 0.0, shaped(0, ()))}
    for row, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1):
        above = kept.get(parent)
        if above and above.p is not None and _plausible(above.p, token, epsilon, delta):
            path = (*above.tokens, token)
            score = above.score + math.log(float(above.p[token]))
            kept[row] = _TypicalRow((*above.path, row), path, score, shaped(row, path))
    best = max(kept.values(), key=lambda k: (len(k.path), k.score))
    if best.p is None:
        return Verdict(best.path[:-1], best.tokens)
    return Verdict(best.path, (*best.tokens, int(best.p.argmax())))


@dataclass(frozen=True, slots=True)
class _TypicalRow:
    """A row that `typical` may keep: its path, the path's log-probability, and the distribution after it (None if the
    row failed)."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    score: float
    p: Tensor | None


def _plausible(p: Tensor, token: int, epsilon: float, delta: float) -> bool:
    entropy = float(torch.special.entr(p).sum())
    return float(p[token]) > min(epsilon, delta * math.exp(-entropy))


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
    """Follow the target's choices down the tree until one was not drafted, or until a row fails."""
    children = {edge: node + 1 for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens: list[int] = []
    row: int | None = 0
    while row is not None:
        token = choose(row, tokens)
        if token is None:
            return Verdict(tuple(path[:-1]), tuple(tokens))
        tokens.append(token)
        row = children.get((row, token))
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
