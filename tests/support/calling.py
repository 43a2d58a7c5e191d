"""A reply with reasoning and a function call, and the parts of a matching request."""

from __future__ import annotations

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Schema of the function's arguments."""
THINKS = '<think>\nI add.\n</think>\n\nIt is:\n<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
