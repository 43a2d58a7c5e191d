"""Expressions for llguidance's Lark grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.sampling.grammar import grammar_error
from paceline.sampling.grammar_compile import ONE_LINE
from paceline.sampling.json_schema import enforceable_schema, with_leniency


def text_expression(text: str, special: Mapping[str, int]) -> str:
    """Return the expression that matches a text.

    Args:
        text: The text.
        special: Special token -> id. Where the text contains the name of a special token, the expression matches the
            token.
    """
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    found = [f"<[{special[part]}]>" if part in special else quoted_text(part) for part in parts if part]
    return " ".join(found) or quoted_text("")


def quoted_text(text: str) -> str:
    """Return the expression that matches a text without special tokens."""
    return json.dumps(text, ensure_ascii=False)


def json_expression(schema: Mapping[str, Any]) -> str:
    """Return the expression that matches JSON that follows a schema, on a single line.

    Raises:
        InvalidOption: If the schema cannot be enforced, and sets "lenient" to false.
    """
    try:
        return f"%json {json.dumps(enforceable_schema(with_leniency(schema), ONE_LINE))}"
    except ValueError as error:
        raise grammar_error("json_schema", f"{error}") from error
