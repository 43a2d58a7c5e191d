"""Progress bars for whatever takes longer than people like to wait without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds before a bar appears."""

Advance = Callable[[int, int], None]
"""(units done, units in all)"""


@contextmanager
def progress_bar(title: str, visible: bool) -> Iterator[Advance]:
    """Show a bar on stderr while the context lasts, once it has lasted `PATIENCE` seconds; it moves to and fro until
    the yielded function is called."""
    if not visible:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=None)
    starter = threading.Timer(PATIENCE, bar.start)
    starter.daemon = True
    starter.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        starter.cancel()
        starter.join()
        if bar.live.is_started:  # stopping writes an empty line where stderr is no terminal
            bar.stop()
