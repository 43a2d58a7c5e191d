"""A small sample of `test_files_fuzz_long.py` in every run."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.fuzz_files import Files


def test_a_hundred_damaged_model_files_are_read_or_refused(tmp_path: Path) -> None:
    files, rng = Files(tmp_path), random.Random(3)
    seen = [files.trial(rng) for _ in range(100)]
    assert 3 < sum(one.endswith("was read") for one in seen) < 67, "some changes are harmless, and most are not"
