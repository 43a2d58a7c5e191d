"""The acceptance rules, as pure functions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.sampling.sampler import Prefix, RuleName, Sampler, not_finite
from paceline.types import Draft, Guarantee, Verdict
from paceline.verify.rejection import RandomDraws, RoundDraws, TargetProbabilities, block_walk, rejection_walk

Rule = Callable[[Draft, Tensor, Sampler, Prefix], Verdict]
"""(draft, logits [T, V] of the pending token and the draft, sampler, prefix of row 0) -> verdict."""

ChooseToken = Callable[[int, Sequence[int]], int | None]
"""(row, drafted tokens that lead to it) -> the target's next token, or None if the row failed (`errors_as_none`)."""

T = TypeVar("T")

_LOG = logging.getLogger("paceline")


def errors_as_none(read: Callable[[int, Sequence[int]], T]) -> Callable[[int, Sequence[int]], T | None]:
    """Wrap a function of (row, drafted tokens that lead to it). For a drafted row, the result returns None instead of
    raising an error.

    A walk ends above such a row, as if the row had not been drafted. If the reply ends there (EOS, a stop string),
    plain decoding would never have read the row. Otherwise, the next round begins with this row and raises the error,
    as plain decoding does. So a draft never decides if a reply fails.
    """

    def attempt(row: int, path: Sequence[int]) -> T | None:
        try:
            return read(row, path)
        except Exception:  # processors may raise any error
            if not path:
                raise
            _LOG.debug("drafted row %d failed; the draft ends above it", row, exc_info=True)
            return None

    return attempt


def match(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
    """Walk down the tree. At each row, choose the target's token, and continue with the child that has this token.

    Only the logits of visited rows are processed and checked. The tokens are the same as with plain decoding and the
    same sampler, whatever was drafted.

    Raises:
        NonFiniteLogits: If the logits of row 0 have no finite maximum. A processor may raise its own errors at row 0.
            For errors at other rows, see `errors_as_none`.
    """
    if sampler.greedy and not sampler.processors and logits.device.type != "cpu":
        return walk(draft, errors_as_none(_greedy(logits, len(prefix))))
    return walk(draft, errors_as_none(lambda row, path: sampler.choose(prefix.after(path), logits[row])))


def _distribution_rule(walk: Callable[[Draft, TargetProbabilities, RandomDraws], Verdict]) -> Rule:
    """Make a rule from a walk that keeps the target's distribution, but not the text of plain decoding.

    The draws come from the sampler's noise, so the same seed and drafter give the same text, but another drafter gives
    another text. A drafter must not use this noise except through `Sampler.rank`. The rule raises `NonFiniteLogits` if
    the logits of row 0 are not finite, and `InvalidOption` if a q of the draft is not a distribution.
    """

    def rule(draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix) -> Verdict:
        def probabilities(row: int, path: Sequence[int]) -> Tensor:
            return sampler.distribution(prefix.after(path), logits[row])

        return walk(draft, errors_as_none(probabilities), RoundDraws(sampler.noise, len(prefix)))

    return rule


def typical(
    draft: Draft, logits: Tensor, sampler: Sampler, prefix: Prefix, epsilon: float = 0.09, delta: float = 0.3
) -> Verdict:
    """Accept the longest drafted path on which all tokens are plausible. This rule is lossy: it changes the
    distribution.

    A token is plausible if p > min(epsilon, delta * exp(-entropy)), where p is the target's distribution after
    processors, temperature and truncation. Among paths of equal length, the likeliest is accepted. The target's
    likeliest token follows, so a round always yields a token. The rule (typical acceptance) and its default values are
    from Medusa, arXiv 2401.10774.

    Raises:
        NonFiniteLogits: If the logits of row 0 have no finite maximum.
    """
    probabilities = errors_as_none(lambda row, path: sampler.distribution(prefix.after(path), logits[row]))
    kept = {0: _TypicalRow((), (), 0.0, probabilities(0, ()))}
    for row, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1):
        above = kept.get(parent)
        if above and above.p is not None and _is_typical(above.p, token, epsilon, delta):
            path = (*above.tokens, token)
            score = above.score + math.log(float(above.p[token]))
            kept[row] = _TypicalRow((*above.path, row), path, score, probabilities(row, path))
    best = max(kept.values(), key=lambda k: (len(k.path), k.score))
    if best.p is None:
        return Verdict(best.path[:-1], best.tokens)
    return Verdict(best.path, (*best.tokens, int(best.p.argmax())))


@dataclass(frozen=True, slots=True)
class _TypicalRow:
    """A row that `typical` may accept.

    Attributes:
        path: Rows on the path to this row, including this row.
        tokens: Tokens of these rows.
        score: Log-probability of the path.
        p: The target's distribution after this row, or None if the row failed.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    score: float
    p: Tensor | None


def _is_typical(p: Tensor, token: int, epsilon: float, delta: float) -> bool:
    entropy = float(torch.special.entr(p).sum())
    return float(p[token]) > min(epsilon, delta * math.exp(-entropy))


RULES: dict[RuleName, Rule] = {
    "match": match,
    "rejection": _distribution_rule(rejection_walk),
    "block": _distribution_rule(block_walk),
    "typical": typical,
}
"""Acceptance rules by name. A greedy sampler uses `match`."""


def text_guarantee(sampler: Sampler, guarantee: Guarantee) -> Guarantee:
    """Return the guarantee for a reply's text. `guarantee`: The guarantee for target and machine
    (`self_check.guarantee`)."""
    if sampler.draws:
        return "distribution"
    return "lossy" if sampler.rule == "typical" else guarantee


def walk(draft: Draft, choose: ChooseToken) -> Verdict:
    """Follow the target's choices down the tree, until a choice was not drafted or a row fails."""
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


def _greedy(logits: Tensor, position: int) -> ChooseToken:
    """Choose the likeliest token, or the lowest id in a tie. All rows share one reduction and one transfer from the
    device."""
    best = logits.max(-1)
    # Values and ids share one tensor, so the device is synchronised once. float32 holds ids below 2^24 exactly.
    values, tokens = torch.stack([best.values, best.indices.to(logits.dtype)]).tolist()

    def choose(row: int, path: Sequence[int]) -> int:
        if not math.isfinite(values[row]):
            raise not_finite(position + len(path))
        return int(tokens[row])

    return choose
