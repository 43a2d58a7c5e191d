"""Small files of prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.train.prompts import Prompts


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(count: int) -> list[str]:
    """Return different short prompts of the toy's letters."""
    return [f"tell me of {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}" for i in range(count)]


def some_prompts(path: Path, count: int) -> Prompts:
    return Prompts(write_rows(path, ({"id": f"p{i}", "prompt": text} for i, text in enumerate(words(count)))))
