"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), *ROOT.glob("*/README.md")]


def blocks(name: str) -> list[str]:
    """Return the Python code of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
