"""Memory that the C library holds although nothing lies in it any more."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """To the system, where it can be asked (glibc): the gaps that requests of all sizes left. Takes milliseconds."""
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
