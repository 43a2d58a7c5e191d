"""Two tiers of one product: a cover of all pairs in `make test`, every combination in `make test-all`.

A test is written once, over all combinations. The combinations outside the cover are marked `slow`, so nothing is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Mapping[str, Any] | Iterable[Any]


def _named(axis: Axis) -> dict[str, Any]:
    return dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis}


def _covering(rows: Sequence[tuple[str, ...]], strength: int) -> set[tuple[str, ...]]:
    """Choose rows greedily until every tuple of `strength` values that occurs in some row is covered.

    allpairspy does the same for products without constraints; with constraints it leaves pairs out.
    """
    holds = {row: set(itertools.combinations(enumerate(row), strength)) for row in rows}
    missing = set().union(*holds.values())
    chosen = set()
    while missing:
        best = max(holds, key=lambda row: len(holds[row] & missing))
        missing -= holds.pop(best)
        chosen.add(best)
    return chosen


def cover(valid: Callable[..., bool] = lambda **_: True, strength: int = 2, **axes: Axis) -> pytest.MarkDecorator:
    """Parametrize a test over the product of its axes; the fast tier runs every pair of values at least once.

    Args:
        valid: Called with one value per axis, by keyword. Combinations for which it returns False do not exist.
        strength: 1 runs every value at least once in the fast tier, 2 every pair, 3 every triple.
        **axes: Argument name -> values. A mapping's keys are the ids; other values are their own ids.
    """
    named = {name: _named(axis) for name, axis in axes.items()}
    rows = {}
    for ids in itertools.product(*named.values()):
        values = {name: named[name][key] for name, key in zip(named, ids, strict=True)}
        if valid(**values):
            rows[ids] = list(values.values())
    fast = _covering(list(rows), strength)
    return pytest.mark.parametrize(
        list(named),
        [
            pytest.param(*values, id="-".join(ids), marks=() if ids in fast else pytest.mark.slow)
            for ids, values in rows.items()
        ],
    )


def some(name: str, values: Axis, fast: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test over all values of one axis; only those whose ids are in `fast` run in the fast tier."""
    named = _named(values)
    if unknown := set(fast) - set(named):
        raise ValueError(f"unknown ids in the fast tier: {sorted(unknown)}")
    return pytest.mark.parametrize(
        name,
        [pytest.param(value, id=key, marks=() if key in fast else pytest.mark.slow) for key, value in named.items()],
    )
