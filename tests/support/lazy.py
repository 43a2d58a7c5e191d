"""Large libraries, imported when a test first uses them, so that workers that only collect tests do not import them."""

from __future__ import annotations

from typing import Any

import pytest


class Lazy:
    """A module that is imported on first use. If it is not installed, the test is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks up `__bases__` and `_mock_name` in each name of a module
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)


transformers: Any = Lazy("transformers")
peft: Any = Lazy("peft")
anthropic: Any = Lazy("anthropic")
playwright: Any = Lazy("playwright.sync_api")
