"""Locking folders that only a single process may use at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import InvalidOption


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes until the block ends, or this process does.

    On Windows, and on file systems without locks, this does nothing.

    Raises:
        InvalidOption: If another process is using the folder.
    """
    with (folder / ".lock").open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidOption(
                    f"another process is using {folder}", "Wait until it has ended, or choose another folder"
                ) from None
        yield
