"""A reply that thinks and calls a function, and the parts of a request for it."""

from __future__ import annotations

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Of the function's arguments."""
THINKS = '<think>\nI add.\n</think>\n\nIt is:\n<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
