"""Two tiers of a product of parameters: `make test` runs a cover of it, and `make test-all` runs every combination.

A test is written once, over all combinations. The combinations outside the cover are marked `slow`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

FAST_ONLY = False
"""True if slow combinations are left out, because `-m "not slow"` would only deselect them. `conftest.py` sets it."""

Axis = Mapping[str, Any] | Iterable[Any]


def _named(axis: Axis) -> dict[str, Any]:
    return dict(axis) if isinstance(axis, Mapping) else {str(value): value for value in axis}


Combination = tuple[tuple[int, str], ...]
"""Values as pairs of axis index and value."""


def _combinations(row: Sequence[str], groups: Iterable[Sequence[int]]) -> set[Combination]:
    return {tuple((axis, row[axis]) for axis in group) for group in groups}


def _chosen(rows: Sequence[tuple[str, ...]], groups: Sequence[Sequence[int]]) -> set[tuple[str, ...]]:
    """Choose rows greedily until they cover every combination of a group's values that occurs in some row.

    Among rows that cover equally many combinations, take the row with the most new pairs, and then the row with the
    least used values. This spreads the values of axes that belong to no group. allpairspy does the same for products
    without constraints, but it misses pairs if there are constraints.
    """
    pairs = [*itertools.combinations(range(len(rows[0])), 2)]
    left = {row: (_combinations(row, groups), _combinations(row, pairs)) for row in rows}
    missing, new = (set().union(*both) for both in zip(*left.values(), strict=True))
    taken: Counter[tuple[int, str]] = Counter()
    chosen = set()
    while missing:
        gain = {row: count for row in left if (count := len(left[row][0] & missing))}
        most = max(gain.values())
        best = max(
            (row for row in gain if gain[row] == most),
            key=lambda row: (len(left[row][1] & new), -sum(taken[value] for value in enumerate(row))),
        )
        left = {row: left[row] for row in gain}
        missing -= left[best][0]
        new -= left[best][1]
        taken.update(enumerate(best))
        chosen.add(best)
    return chosen


def cover(
    valid: Callable[..., bool] = lambda **_: True,
    together: Collection[Sequence[str]] | None = None,
    **axes: Axis,
) -> pytest.MarkDecorator:
    """Parametrize a test over the product of two or more axes. The fast tier runs a cover of it.

    Args:
        valid: Called with one value per axis, by keyword. Combinations for which it returns False do not exist.
        together: Groups of axes. The fast tier runs every combination of values of each group at least once. For a
            group of one axis, these are its values. By default, the groups are all pairs of axes.
        **axes: Argument name -> values. A mapping's keys are the ids; other values are their own ids.
    """
    named = {name: _named(axis) for name, axis in axes.items()}
    rows = {}
    for ids in itertools.product(*named.values()):
        values = {name: named[name][key] for name, key in zip(named, ids, strict=True)}
        if valid(**values):
            rows[ids] = list(values.values())
    names = [*named]
    groups = [*itertools.combinations(names, 2)] if together is None else together
    fast = _chosen([*rows], [[names.index(name) for name in group] for group in groups])
    return pytest.mark.parametrize(
        list(named),
        [
            pytest.param(*values, id="-".join(ids), marks=() if ids in fast else pytest.mark.slow)
            for ids, values in rows.items()
            if ids in fast or not FAST_ONLY
        ],
    )


def some(name: str, values: Axis, fast: Collection[str]) -> pytest.MarkDecorator:
    """Parametrize a test over all values of one axis. The fast tier runs only the values with ids in `fast`."""
    named = _named(values)
    if unknown := set(fast) - set(named):
        raise ValueError(f"unknown ids in the fast tier: {sorted(unknown)}")
    return pytest.mark.parametrize(
        name,
        [
            pytest.param(value, id=key, marks=() if key in fast else pytest.mark.slow)
            for key, value in named.items()
            if key in fast or not FAST_ONLY
        ],
    )
