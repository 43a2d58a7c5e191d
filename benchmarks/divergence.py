"""Where two texts part, and whether rounding may be why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two token sequences part: the first unequal position, the shorter's end, or None if they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text leaves the reference's. `ours`, `theirs`: the two tokens there (None: that text has ended).

    `margin`: the reference's best logit there less its second best. `gap`: its logit of `theirs` less that of
    `ours`, never below the margin. `excused`: a near tie that rounding may decide either way.
    """

    prompt: int | str
    position: int
    ours: int | None
    theirs: int | None
    margin: float | None
    gap: float | None
    excused: bool


def classify(
    prompt: int | str, ours: Sequence[int], theirs: Sequence[int], logits: Sequence[Tensor], limit: float
) -> Divergence | None:
    """The first divergence of `ours` from `theirs`, or None. `logits[i]` [V] are those that chose `theirs[i]`.

    Excused only if our token's logit is within `limit` of the reference's choice: a small top-2 margin alone would
    also excuse a third token that has no business there. A text that just ends, or goes on, is never excused.
    """
    at = first_difference(ours, theirs)
    if at is None:
        return None
    mine = ours[at] if at < len(ours) else None
    other = theirs[at] if at < len(theirs) else None
    if other is None:
        return Divergence(prompt, at, mine, None, None, None, False)
    row = logits[at].double()
    best = torch.topk(row, 2).values
    margin = float(best[0] - best[1])
    gap = None if mine is None else float(row[other] - row[mine])
    return Divergence(prompt, at, mine, other, margin, gap, gap is not None and max(margin, gap) < limit)
