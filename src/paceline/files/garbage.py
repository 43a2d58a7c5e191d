"""A pause of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector while much is made that stays.

    Beside torch's 160,000 objects one collection takes 0.1 s, and an import or a vocabulary causes some. JSON has no
    cycles, and millions of lists make the collector walk the whole heap again and again (2 s alone, 11 s in a process
    that holds much).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
