"""Parsing of --adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from paceline.checkpoints.adapters import Adapter


def parse_adapters(texts: Sequence[str]) -> tuple[str | None, dict[str, str | Adapter]]:
    """Parse the values of --adapter.

    Returns:
        The adapter to merge (or None), and the adapters to keep separate from the model, by name.

    Raises:
        InvalidOption: If a value is not an adapter, or two have the same name.
    """
    merged: list[str] = []
    named: dict[str, str | Adapter] = {}
    for text in texts:
        adapter: str | Adapter
        name, _, path = text.partition("=")
        if text.lstrip().startswith("{"):
            name, adapter = _parse_adapter(text)
        elif path and not os.path.exists(text):
            adapter = path
        else:
            merged.append(text)
            continue
        if name in named:
            raise InvalidOption(f"two adapters have the name {name}", "Give one of them another name")
        named[name] = adapter
    if len(merged) > 1:
        raise InvalidOption(f"only one adapter can be merged, got {len(merged)}", "Write the others as NAME=ADAPTER")
    return next(iter(merged), None), named


def _parse_adapter(text: str) -> tuple[str, Adapter]:
    """Parse name and adapter from a JSON object, as in vLLM's --lora-modules."""
    from paceline.checkpoints.adapters import Adapter

    try:
        fields = json.loads(text)
        name = fields.pop("name")
        return str(name), Adapter(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidOption(
            f"--adapter {text:.80} is not an adapter ({type(error).__name__}: {error})",
            'Write {"name": "mix", "path": ["A", "B"], "weights": [0.7, 0.3]}',
        ) from error
