"""Kernels of every instruction set of this processor: the fast tier tests the best."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.kernels.cpu.build import SETS, available
from tests.support.instruction_sets import using

OTHERS = available()[:-1]


@pytest.fixture(scope="module", params=[available()[-1], *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every instruction set of this processor, the best first."""
    with using(SETS[request.param]):
        yield
