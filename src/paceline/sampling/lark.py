"""Expressions of llguidance's Lark grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.sampling.grammar import refused
from paceline.sampling.grammar_compile import ONE_LINE
from paceline.sampling.json_schema import enforceable, guide


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as an expression. `special`: ids of the parts of texts that are special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    found = [f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part]
    return " ".join(found) or quoted("")


def quoted(text: str) -> str:
    """Return a text without special tokens as an expression."""
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: Mapping[str, Any]) -> str:
    """Return JSON of a schema, on one line, as an expression. Raises `InvalidOption` for a schema that says it is no
    guide and cannot be enforced."""
    try:
        return f"%json {json.dumps(enforceable(guide(schema), ONE_LINE))}"
    except ValueError as error:
        raise refused("json_schema", f"{error}") from error
