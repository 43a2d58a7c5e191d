"""A measure of work that does not depend on the machine: lines of Paceline's Python code that run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paceline

_PACKAGE = str(Path(paceline.__file__).parent)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the lines that run. Yield a function that returns the count so far."""
    lines, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename.startswith(_PACKAGE) else None

    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)
