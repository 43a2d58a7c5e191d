"""Large libraries, imported where a test first uses them: not by every worker that collects tests."""

from __future__ import annotations

from typing import Any

import pytest


class Lazy:
    """A module that is imported when something of it is used; skips the test where it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks each name of a module for `__bases__` and `_mock_name`
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)


transformers: Any = Lazy("transformers")
peft: Any = Lazy("peft")
anthropic: Any = Lazy("anthropic")
playwright: Any = Lazy("playwright.sync_api")
