"""JSONL files of any size: random access by line without loading them, and appending that survives a kill."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from paceline.errors import InvalidData
from paceline.protocols import Closable

_BOM = b"\xef\xbb\xbf"
LONGEST = 1 << 26
"""Bytes of a line at most."""
_START_OVER = "Use the options it was made with or another folder, or delete it to start over"


class JsonlFile:
    """The lines of a file that are not blank, read from disk at each access; 8 bytes per line stay in memory.

    `digest`: hash of the file's content. Lines that are appended later are not seen.
    """

    def __init__(self, path: Path, visit: Callable[[bytes, int], None]) -> None:
        """Call `visit(line, number)` for each line, numbered from 1; its `ValueError` becomes an `InvalidData` that
        names file and line. Raises `OSError`."""
        self.path = path
        self._offsets = array("q")
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(offset)
            for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
                if len(line) > LONGEST:
                    raise InvalidData(f"{path}, line {number}: longer than {LONGEST >> 20} MiB", "Remove the line")
                digest.update(line)
                if line.strip():
                    self._offsets.append(offset)
                    self._check(visit, line, number)
                offset += len(line)
        self.digest = digest.hexdigest()

    def _check(self, visit: Callable[[bytes, int], None], line: bytes, number: int) -> None:
        try:
            visit(line, number)
        except InvalidData:
            raise
        except ValueError as error:
            raise InvalidData(f"{self.path}, line {number}: {error}", "Correct or remove the line") from None

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        # Opened anew: a file that stays open would share its position with forks and threads.
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return file.readline()


class Journal(Closable):
    """A JSONL file that is appended to line by line; after a kill it holds every line that was appended.

    A partial last line, which a kill can leave, is removed when the file is opened again.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """`mode`: permissions of a new file, before the umask. Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode), "ab+")
        if size := path.stat().st_size:
            with mmap(self._file.fileno(), size, access=ACCESS_READ) as content:
                size = content.rfind(b"\n") + 1
            self._file.truncate(size)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, and hand it to the operating system at once."""
        # ASCII, and one write per line: nothing but a kill inside that write can tear it.
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Make sure that a file is continued with the settings it was begun with.

    They are stored beside it (`answers.jsonl` -> `answers.settings.json`), before its first line is written. Raises
    `InvalidData` where they differ or are missing.
    """
    beside = path.with_suffix(".settings.json")
    wanted = json.loads(json.dumps(settings))
    if not path.exists() or not path.stat().st_size:
        replace_with(beside, lambda new: new.write_text(json.dumps(wanted, indent=2) + "\n"))
    elif not beside.exists():
        raise InvalidData(f"{path} exists without {beside.name}, which records its settings", _START_OVER)
    else:
        known = _settings(beside)
        for name in wanted:
            if known.get(name) != wanted[name]:
                raise InvalidData(f"{path} was made with {name} {known.get(name)}, not {wanted[name]}", _START_OVER)


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InvalidData(f"{path} is damaged ({error})", "Delete it together with the file it describes") from None


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically: `write` fills a new file beside it, which is then renamed.

    An error in between is raised again and leaves the old file alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        write(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
