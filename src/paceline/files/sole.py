"""Folders that one process works in at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import InvalidOption


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder until the block ends, or this process. Raises `InvalidOption` if one is at
    work in it. On Windows, and on file systems without locks, nothing is kept out."""
    with (folder / ".lock").open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidOption(
                    f"another process is at work in {folder}", "Wait until it has ended, or choose another folder"
                ) from None
        yield
