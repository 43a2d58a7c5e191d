"""Kernels for every instruction set of this processor. The fast tier tests the best one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.kernels.cpu.build import SETS, available, instruction_set
from tests.support import cover
from tests.support.instruction_sets import using


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernels" in metafunc.fixturenames:
        best = instruction_set().name  # the set that PACELINE_ISA names, if it names one
        others = [] if cover.FAST_ONLY else [name for name in available() if name != best]
        names = [best, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]
        metafunc.parametrize("kernels", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Select every instruction set of this processor, the best first."""
    with using(SETS[request.param]):
        yield
