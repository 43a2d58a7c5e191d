"""The truncation methods top_n_sigma, top_k, top_p, min_p, typical_p and XTC.

Every method finds a threshold. Equal scores are either all kept or all dropped, so the result does not depend on how a
sort breaks ties. Only the few columns near the top are sorted. Probabilities are float64, so that rounding differences
between machines do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

_LOWEST_FINITE = -float(np.finfo(np.float32).max)
"""A threshold that every finite score reaches."""

_MAX_SORTED = 256
"""Maximum number of columns that are sorted."""


def truncate(
    scores: Floats,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_n_sigma: float = 0.0,
) -> tuple[Ids | None, Floats]:
    """Apply the methods in order, each to the result of the previous method.

    Args:
        scores: Logits / temperature, [V]. The highest score must be finite.
        top_k: See `Sampling`.
        top_p: See `Sampling`.
        min_p: See `Sampling`.
        typical_p: See `Sampling`.
        top_n_sigma: See `Sampling`.

    Returns:
        The token ids that survive, in ascending order (None if no token is dropped), and their scores.
    """
    cuts = [
        (top_n_sigma > 0.0, partial(_top_n_sigma, n=top_n_sigma)),
        (0 < top_k < len(scores), partial(_top_k, k=top_k)),
        (top_p < 1.0, partial(_top_p, p=top_p)),
        (min_p > 0.0, partial(_min_p, p=min_p)),
        (typical_p < 1.0, partial(_typical, p=typical_p)),
    ]
    tokens: Ids | None = None
    for wanted, cut in cuts:
        if not wanted:
            continue
        keys, low = cut(scores)
        kept = np.flatnonzero(keys >= max(low, _LOWEST_FINITE))
        scores, tokens = scores[kept], kept if tokens is None else tokens[kept]
    return tokens, scores


def exclude_top_choices(scores: Floats, threshold: float) -> Ids | None:
    """Apply XTC ("exclude top choices"): drop all tokens with a probability >= `threshold` except the least likely one.

    A threshold above 0.5 drops no tokens, because at most one token can reach such a probability. Source:
    text-generation-webui, pull request 6335.

    Returns:
        The remaining columns, in ascending order, or None if all columns remain.
    """
    if threshold > 0.5:
        return None
    weights = _unnormalised_probs(scores)
    likely = (weights >= threshold * weights.sum()) & (scores > -np.inf)
    if np.count_nonzero(likely) < 2:
        return None
    return np.flatnonzero(scores <= scores[likely].min())


def _top_n_sigma(scores: Floats, n: float) -> tuple[Floats, float]:
    """Keep tokens within n standard deviations of the highest logit (Tang et al., arXiv 2411.07641)."""
    return scores, float(scores.max()) - n * float(scores[finite_columns(scores)].std(dtype=np.float64))


def _top_k(scores: Floats, k: int) -> tuple[Floats, float]:
    near = scores[highest_columns(scores, k)]
    return scores, float(np.partition(near, len(near) - k)[len(near) - k]) if len(near) >= k else _LOWEST_FINITE


def _top_p(scores: Floats, p: float) -> tuple[Floats, float]:
    return scores, _mass_threshold(scores, _unnormalised_probs(scores), p)


def _min_p(scores: Floats, p: float) -> tuple[Floats, float]:
    return scores, float(scores.max()) + math.log(p)


def _typical(scores: Floats, p: float) -> tuple[Floats, float]:
    """Keep the tokens whose surprise is nearest to the row's entropy (Meister et al., arXiv 2202.00666)."""
    weights = _unnormalised_probs(scores)
    total = weights.sum()
    logp = scores.astype(np.float64) - (float(scores.max()) + math.log(total))
    likely = weights > 0.0
    entropy = -float((weights[likely] * logp[likely]).sum() / total)
    keys = -np.abs(logp + entropy)
    return keys, _mass_threshold(keys, weights, p)


def _unnormalised_probs(scores: Floats) -> npt.NDArray[np.float64]:
    return np.exp(scores.astype(np.float64) - float(scores.max()))


def _mass_threshold(keys: Floats, weights: npt.NDArray[np.float64], p: float) -> float:
    """Return the key at which the tokens, taken from the highest key down, reach the fraction `p` of the total
    weight."""
    wanted, before = p * weights.sum(), 0.0
    for near in columns_by_margin(keys):
        if weights[near].sum() >= wanted:
            break
    keys, weights = keys[near], weights[near]
    if len(keys) > _MAX_SORTED:
        # Without sorting, find the bin (a sixteenth of a nat) that contains the threshold.
        bins = np.minimum((keys.max() - keys) * 16.0, 2048.0).astype(np.intp)
        sums = np.bincount(bins, weights).cumsum()
        at = min(int((sums < wanted).sum()), len(sums) - 1)
        before = sums[at - 1] if at else 0.0
        keys, weights = keys[bins == at], weights[bins == at]
    order = np.argsort(-keys, kind="stable")
    reached = int((before + weights[order].cumsum() < wanted).sum())
    # If rounding keeps the sum slightly below `wanted`, use the last token.
    return float(keys[order[min(reached, len(order) - 1)]])


def highest_columns(keys: Floats, count: int) -> Ids:
    """Return columns, in ascending order, that include the `count` highest keys and usually few others.

    There are fewer columns if fewer keys are finite.
    """
    for found in columns_by_margin(keys):
        if len(found) >= count:
            break
    return found


def columns_by_margin(keys: Floats) -> Iterator[Ids]:
    """Yield the columns within a growing margin of the highest key, in ascending order, and finally all finite
    columns."""
    top = keys.max()
    for margin in (4.0, 8.0, 16.0, 32.0):
        yield np.flatnonzero(keys >= top - keys.dtype.type(margin))
    yield finite_columns(keys)


def finite_columns(keys: Floats) -> Ids:
    """Return the columns that are not -inf, in ascending order."""
    return np.flatnonzero(keys > -np.inf)
