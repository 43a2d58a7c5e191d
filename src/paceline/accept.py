"""Which drafted tokens stand. Pure functions: no I/O, no state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.sampler import RuleName, Sampler, not_finite
from paceline.types import Draft, Verdict

Rule = Callable[[Draft, Tensor, Sampler], Verdict]
"""(draft, logits [T, V] of the pending token and the draft, sampler) -> what stands."""

Choose = Callable[[int, Sequence[int]], int]
"""(row, drafted tokens that lead to it) -> the target's own next token."""


def match(draft: Draft, logits: Tensor, sampler: Sampler) -> Verdict:
    """At each visited row the target chooses as it would alone; the walk goes on into the child that has the token.

    Only visited rows are shaped and checked. The tokens are those that plain decoding with the same `sampler` yields,
    whatever was drafted. Raises `NonFiniteLogits`.
    """
    if sampler.greedy and not sampler.processors:
        return walk(draft, _greedy(logits, len(sampler.text)))
    return walk(draft, lambda row, path: sampler.choose(logits[row], path))


RULES: dict[RuleName, Rule] = {"match": match}


def walk(draft: Draft, choose: Choose) -> Verdict:
    """Follow the target's choices down the tree until one is not there."""
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
    """All rows at once: one reduction costs less than one call per visited row. Ties go to the lowest id."""
    values, tokens = (x.tolist() for x in logits.max(-1))

    def choose(row: int, path: Sequence[int]) -> int:
        if not math.isfinite(values[row]):
            raise not_finite(position + len(path))
        return tokens[row]  # type: ignore[no-any-return]

    return choose
