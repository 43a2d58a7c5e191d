"""Files with one JSON object per line, of any size: read by line without being held, grown without being spoilt."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidData
from paceline.protocols import Closable

_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The lines of a file that are not blank, read from disk at each access; 8 bytes are kept of each.

    `digest`: names the file's content. What is appended later is not seen.
    """

    def __init__(self, path: Path, visit: Callable[[bytes, int], None]) -> None:
        """`visit` sees each line and its number, from 1, and raises `ValueError` where it is wrong: an `InvalidData`
        then names file and line. Raises `OSError`."""
        self.path = path
        self._offsets = array("q")
        self._blank = array("q")
        """Per blank line, how many lines come before it that are not."""
        digest = hashlib.blake2b(digest_size=16)
        for number, (offset, line) in enumerate(_scan(path), 1):
            digest.update(line)
            if not line.strip():
                self._blank.append(len(self))
                continue
            self._offsets.append(offset)
            try:
                visit(line, number)
            except ValueError as error:
                raise InvalidData(f"{path}, line {number}: {error}", "Correct the line or take it out") from None
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        # Opened anew: a file that stays open would share its position with forks and threads.
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return file.readline()

    def number(self, index: int) -> int:
        """On which line of the file it is, from 1."""
        return index + 1 + int(np.searchsorted(np.asarray(self._blank), index, "right"))


def _scan(path: Path) -> Iterator[tuple[int, bytes]]:
    """(Offset, line) of every line; a byte order mark is no part of the first."""
    at = 0
    with path.open("rb") as file:
        for line in file:
            skip = len(_BOM) if not at and line.startswith(_BOM) else 0
            yield at + skip, line[skip:]
            at += len(line)


class Journal(Closable):
    """A JSONL file that grows line by line. Killed at any moment, it holds every line that was appended.

    One that a kill left with part of a last line loses that part when it is opened again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.truncate(_whole(self._file))

    def append(self, row: Mapping[str, Any]) -> None:
        # ASCII, and one write per line: nothing but a kill inside that write can tear it.
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole(file: Any, block: int = 1 << 16) -> int:
    """How many bytes of the file are whole lines."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0


def made_with(path: Path, settings: Mapping[str, Any]) -> None:
    """Let a file be continued by the same command only.

    The settings lie beside it (`answers.jsonl` -> `answers.settings.json`), written before its first line. Raises
    `InvalidData` where they differ, or where the file has none and so was made elsewhere.
    """
    beside = path.with_suffix(".settings.json")
    wanted = json.loads(json.dumps(settings))
    if not path.exists() or not path.stat().st_size:
        replace_with(beside, lambda new: new.write_text(json.dumps(wanted, indent=2) + "\n"))
    elif not beside.exists():
        raise InvalidData(f"{path} is there, and {beside.name}, which says how it was made, is not", _ANEW)
    else:
        known = _settings(beside)
        for name in wanted:
            if known.get(name) != wanted[name]:
                raise InvalidData(f"{path} was made with {name} {known.get(name)}, not {wanted[name]}", _ANEW)


_ANEW = "Give the options it was made with, take another folder, or delete it to begin anew"


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InvalidData(f"{path} is damaged ({error})", "Delete it together with the file it describes") from None


def replace_with(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name and put it in its place whole, so that a kill leaves the old or the new one.

    Whatever goes wrong meanwhile is raised, and leaves nothing of the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        write(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
