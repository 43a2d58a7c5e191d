"""10,000 damaged model files: no hang, no bare exception, no large allocation."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from tests.support.fuzz_files import MEMORY, Files

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_damaged_model_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    files, rng = Files(tmp_path), random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = [files.trial(rng) for _ in range(1000)]
    assert 50 < sum(one.endswith("was read") for one in seen) < 700, "some changes are harmless, and most are not"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY
