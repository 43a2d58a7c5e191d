"""Errors at a chosen moment: at the n-th call or line in Paceline's own code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import paceline

_SOURCE = str(Path(paceline.__file__).parent)


@dataclass
class Moments:
    """Counter of the moments so far."""

    count: int = 0


def _leaves_context(frame: FrameType) -> bool:
    """Return True if the line begins a `with`, which is traced again before the block's end.

    No interrupt arrives there, because Python checks for signals after calls and at backward jumps.
    """
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


@contextmanager
def raising(error: BaseException | None, moment: int, lines: bool) -> Iterator[Moments]:
    """Raise `error` once in this thread, at the moment with this number (1 is the first).

    If `lines` is True, every line is a moment, as for an interrupt. Otherwise, every call is a moment.
    """
    passed = Moments()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        if event == ("line" if lines else "call") and not _leaves_context(frame):
            passed.count += 1
            if passed.count == moment and error is not None:
                raise error  # Python stops tracing then
        return trace if lines else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)
