"""Progress bars for long operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds before a bar appears."""

Advance = Callable[[int, int], None]
"""(finished units, total units)"""


@contextmanager
def progress_bar(title: str, visible: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr if the context lasts for longer than `PATIENCE` seconds.

    The bar moves back and forth until the yielded function is called for the first time.
    """
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
        if bar.live.is_started:  # stopping a bar that was never shown writes an empty line if stderr is not a terminal
            bar.stop()
