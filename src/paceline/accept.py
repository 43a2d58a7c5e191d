"""Which drafted tokens stand. Pure functions: no I/O, no state."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from paceline.sampling import Sampler, not_finite
from paceline.types import Draft, Verdict

Choose = Callable[[int, int], int]
"""(row, position) -> the target's own token for that position, given the path that ends in that row."""


def match(draft: Draft, logits: Tensor, position: int, sampler: Sampler) -> Verdict:
    """At each visited row the target chooses as it would alone; the walk goes on into the child that has the token.

    `logits` [T, V] of the pending token and the draft; the pending token stands at `position`. Only visited rows
    are shaped and checked. The tokens are those that plain decoding with the same `sampler` yields, whatever was
    drafted. Raises `NonFiniteLogits`.
    """
    return walk(
        draft,
        position,
        _greedy(logits) if sampler.greedy else lambda row, at: sampler.choose(logits[row], at),
    )


def walk(draft: Draft, position: int, choose: Choose) -> Verdict:
    """Follow the target's choices down the tree until one is not there."""
    children = {edge: node + 1 for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    path: list[int] = []
    tokens: list[int] = []
    row: int | None = 0
    while row is not None:
        position += 1
        tokens.append(choose(row, position))
        row = children.get((row, tokens[-1]))
        if row is not None:
            path.append(row)
    return Verdict(tuple(path), tuple(tokens))


def _greedy(logits: Tensor) -> Choose:
    """All rows at once: one reduction costs less than one call per visited row. Ties go to the lowest id."""
    values, tokens = (x.tolist() for x in logits.max(-1))

    def choose(row: int, position: int) -> int:
        if not math.isfinite(values[row]):
            raise not_finite(position)
        return tokens[row]  # type: ignore[no-any-return]

    return choose
