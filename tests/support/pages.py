"""Pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), *ROOT.glob("*/README.md")]
}


def code_of(page: Path) -> list[str]:
    """Return the blocks of Python code in a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def blocks(name: str) -> list[str]:
    """Return the blocks of Python code in a page of docs/."""
    return code_of(DOCS / name)
