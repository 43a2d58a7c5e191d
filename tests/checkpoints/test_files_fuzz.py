"""A small sample of `test_files_fuzz_long.py` in every run."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.fuzz_files import Files


def test_a_few_hundred_damaged_model_files_are_read_or_refused(tmp_path: Path) -> None:
    files, rng = Files(tmp_path), random.Random(7)
    seen = [files.trial(rng) for _ in range(300)]
    assert 20 < sum(one.endswith("was read") for one in seen) < 200, "some changes are harmless, and most are not"
