"""JSONL files of any size: random access to lines without loading the file, and appending that loses no complete line
if the process is killed."""

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
MAX_LINE_BYTES = 1 << 26
"""Maximum length of a line in bytes."""
_START_OVER = "Use the same options again or another folder, or delete the file to start over"


class JsonlFile:
    """The non-blank lines of a file. Each access reads a line from disk. Only 8 bytes per line stay in memory.

    Lines that are appended later are ignored.

    Attributes:
        path: The file.
        digest: Hash of the file's content.
    """

    def __init__(self, path: Path, visit: Callable[[bytes, int], None]) -> None:
        """Read a file once.

        Args:
            path: The file.
            visit: Called with each non-blank line and its number, counted from 1. It may raise `ValueError`.

        Raises:
            InvalidData: If `visit` raises `ValueError`, or a line is too long. The message names file and line.
            OSError: If the file cannot be read.
        """
        self.path = path
        self._offsets = array("q")
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(offset)
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidData(
                        f"{path}, line {number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB", "Remove it"
                    )
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
        # Open the file each time, because an open file would share its position with forks and threads.
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return file.readline()


class Journal(Closable):
    """A JSONL file to which lines are appended. Even if the process is killed, it keeps every line that was appended.

    If the process is killed, the last line may be incomplete. It is removed when the file is opened again.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create a file.

        Args:
            path: The file. Missing folders are created.
            mode: Permissions of a new file, before the umask.

        Raises:
            OSError: If the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode), "ab+")
        if size := path.stat().st_size:
            with mmap(self._file.fileno(), size, access=ACCESS_READ) as content:
                size = content.rfind(b"\n") + 1
            self._file.truncate(size)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, and hand it to the operating system immediately."""
        self._write(_line(row))

    def _write(self, line: bytes) -> None:
        # Each line is a single write of ASCII text, so only a kill during that write can leave a partial line.
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class BoundedJournal(Journal):
    """A journal of at most `limit` bytes in two files, FILE and FILE.old. The oldest lines are dropped.

    Both files begin with the row `header`.
    """

    def __init__(self, path: Path, mode: int, limit: int, header: Mapping[str, Any]) -> None:
        """Open or create the file. Raise the errors of `Journal`."""
        super().__init__(path, mode)
        self._path, self._mode, self._half, self._header = path, mode, limit // 2, header
        self._size = path.stat().st_size
        if not self._size:
            self._begin()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, unless the row is longer than the limit allows."""
        line = _line(row)
        if self._size + len(line) > self._half:
            if len(line) + len(_line(self._header)) > self._half:
                return
            self._rotate()
        self._write(line)
        self._size += len(line)

    def _rotate(self) -> None:
        self.close()
        os.replace(self._path, older_file(self._path))
        super().__init__(self._path, self._mode)
        self._begin()

    def _begin(self) -> None:
        super().append(self._header)
        self._size = self._path.stat().st_size


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def older_file(path: Path) -> Path:
    """Return the file with the older lines of a `BoundedJournal`."""
    return path.with_name(path.name + ".old")


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Check that a file is continued with the settings that it was begun with.

    The settings are stored next to the file (`answers.jsonl` -> `answers.settings.json`) before its first line is
    written.

    Raises:
        InvalidData: If the stored settings differ or are missing.
    """
    companion = path.with_suffix(".settings.json")
    wanted = json.loads(json.dumps(settings))
    if not path.exists() or not path.stat().st_size:
        replace_with(companion, lambda new: new.write_text(json.dumps(wanted, indent=2) + "\n"))
    elif not companion.exists():
        raise InvalidData(f"{path} exists without {companion.name}, which records its settings", _START_OVER)
    else:
        known = _settings(companion)
        for name in wanted:
            if known.get(name) != wanted[name]:
                raise InvalidData(f"{path} was made with {name} {known.get(name)}, not {wanted[name]}", _START_OVER)


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error})", "Delete it together with the file that it describes"
        ) from None


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically.

    `write` fills a new file in the same folder, which then replaces the old file. If that fails, the old file stays
    unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        write(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
