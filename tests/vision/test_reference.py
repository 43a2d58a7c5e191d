"""The table of vision models in docs/reference/models.md."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.vision.families import VISION

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_the_table_lists_all_families() -> None:
    section = PAGE.read_text("utf-8").partition("## Models that see")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)[1:] == sorted(VISION)
