"""Values of --adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import InvalidOption

if TYPE_CHECKING:
    from paceline.checkpoints.adapters import Adapter


def parse_adapters(texts: Sequence[str]) -> tuple[str | None, dict[str, str | Adapter]]:
    """Return the values of --adapter: the one to merge, and those beside the model by name. Raises `InvalidOption`."""
    merged: list[str] = []
    beside: dict[str, str | Adapter] = {}
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
        if name in beside:
            raise InvalidOption(f"two adapters are called {name}", "Give one of them another name")
        beside[name] = adapter
    if len(merged) > 1:
        raise InvalidOption(
            f"{len(merged)} adapters are to be merged", "Merge one, and give the others as NAME=ADAPTER"
        )
    return next(iter(merged), None), beside


def _parse_adapter(text: str) -> tuple[str, Adapter]:
    """Return name and adapter of a JSON object, as vLLM's --lora-modules has them. Raises `InvalidOption`."""
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
