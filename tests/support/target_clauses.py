"""The contract of targets by clause. `check_target` checks all clauses, and the fast tier checks some per target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paceline.protocols import Target
from paceline.testing import targets
from paceline.testing.probe import Probe
from paceline.types import Tap

CLAUSES = {clause.__name__.strip("_"): clause for clause in targets.CLAUSES}


def clauses(**fast: str) -> pytest.MarkDecorator:
    """Parametrize `kind` and `clause` over all clauses of all kinds of targets.

    Args:
        **fast: Kind of target -> the clauses that the fast tier checks, separated by spaces.
    """
    if unknown := {clause for some in fast.values() for clause in some.split()} - set(CLAUSES):
        raise ValueError(f"unknown clauses: {sorted(unknown)}")
    return pytest.mark.parametrize(
        ("kind", "clause"),
        [
            pytest.param(kind, clause, id=f"{kind}-{clause}", marks=() if clause in some.split() else pytest.mark.slow)
            for kind, some in fast.items()
            for clause in CLAUSES
        ],
    )


def check_clause(clause: str, make: Callable[[], Target], *, tolerance: float = 1e-6, taps: Sequence[Tap] = ()) -> None:
    """Check one clause in the same way as `check_target`."""
    CLAUSES[clause](Probe(make(), tolerance, tuple(taps)))
