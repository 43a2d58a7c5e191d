"""A measure of work that does not depend on the machine: lines of Paceline's Python code that run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the lines that run. Yields a function that returns the count so far."""
    lines, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if "paceline" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)
