"""A folder of cached texts that outlive the process. `prefix_file.py` describes the files.

Several processes may share a folder without locks. A file gets its final name only when it is complete, and is never
changed afterwards. Its modification time is the time of its last use, so all processes agree on the least recently used
files. Each process removes such files before it writes, which keeps the folder within its limit.

Files are written without fsync. If the machine crashes, a file may lack some of its data. Its checksums are then wrong,
and it is removed. Waiting for the disk would only make that rarer.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paceline.drafters.base import Drafter
from paceline.engine.prefix_file import (
    CachedText,
    DamagedPrefix,
    ForeignPrefix,
    PrefixHeader,
    UnsupportedState,
    load,
    prepare,
    read_header,
    write,
)
from paceline.errors import InvalidOption
from paceline.protocols import restored

_LOG = logging.getLogger("paceline.prefixes")

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.prefix")
"""Names of finished files: the start of the key, and a hash of the text."""
_UNFINISHED = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.[0-9]+-[0-9]+\.tmp")
_MAX_FILES = 10_000
"""Maximum number of files whose headers are read, the most recently used first."""
_STALE = 600.0
"""Seconds without a write after which an unfinished file is removed, because its process must have died. Checking
process ids would be faster, but does not work between containers that share a folder."""
_SETTLED = 50_000_000
"""Nanoseconds after which another write is certain to change the folder's modification time."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A text to write, the texts that it replaces, and the time of its last use, in nanoseconds."""

    text: CachedText
    replaces: Sequence[CachedText]
    used: int


class PrefixStore:
    """The texts of one target in a folder. Only the engine's thread may call the methods. Another thread writes the
    texts."""

    def __init__(
        self, folder: Path, limit: int, key: str, cache: object, drafters: Mapping[str, tuple[str, Drafter]]
    ) -> None:
        """Open a folder, and create it if it is missing.

        Args:
            folder: The folder.
            limit: Maximum size of all files in it, in bytes.
            key: Key of the target (`prefix_key.target_key`).
            cache: Cache of the target.
            drafters: Name of a drafter -> its key and the drafter.

        Raises:
            InvalidOption: If the folder cannot be used, or other users can write to it.
        """
        self.folder, self.limit = folder, limit
        self._key, self._cache, self._drafters = key, cache, drafters
        self._files: dict[CachedText, str] = {}
        """Text (without tensor data) -> name of its file."""
        self._ignored: set[tuple[str, int]] = set()
        """Names and modification times of invalid files."""
        self._seen = 0
        """Modification time of the folder when it was most recently read."""
        self._size = 0, 0
        """Modification time of the folder when its size was most recently determined, and that size."""
        self._warned: set[object] = set()
        self._lock = threading.RLock()
        self._queue: deque[_Job] = deque()
        self._writing: CachedText | None = None
        self._thread: threading.Thread | None = None
        _check_folder(folder)
        self.refresh(_MAX_FILES)

    @property
    def texts(self) -> list[CachedText]:
        """The texts in the folder, without tensor data."""
        with self._lock:
            return [*self._files]

    @property
    def waiting(self) -> list[CachedText]:
        """The texts that are being written or wait to be written. They hold memory."""
        with self._lock:
            return [*([self._writing] if self._writing else []), *(job.text for job in self._queue)]

    @property
    def nbytes(self) -> int:
        """Total size of the prefix files in the folder, of all models, in bytes. 0 if the folder cannot be read."""
        try:
            changed = self.folder.stat().st_mtime_ns
            if changed != self._size[0]:
                self._size = changed, sum(state.st_size for _, state in self._listed())
        except OSError:
            return 0
        return self._size[1]

    def keeps(self, drafter: str) -> bool:
        """Return True if files contain this drafter's states. They do not if the drafter was loaded later, because it
        has no key."""
        return drafter in self._drafters

    def refresh(self, most: int = 100) -> None:
        """Look for files that other processes have added or removed. `most`: Maximum number of new files to read."""
        try:
            changed = self.folder.stat().st_mtime_ns
            if changed == self._seen:
                return
            own = [(entry.name, state.st_mtime_ns) for entry, state in self._listed() if _NAME.fullmatch(entry.name)]
        except OSError as error:
            self._warn(error.errno, "cannot read the prefixes in %s: %s", self.folder, error)
            return
        found = {name: used for name, used in own if name.startswith(self._key[:32])}
        with self._lock:
            self._files = {text: name for text, name in self._files.items() if name in found}
            known = {*self._files.values(), *(name for name in found if (name, found[name]) in self._ignored)}
        new = sorted(found.keys() - known, key=lambda name: -found[name])
        for name in new[:most]:
            if not self._add(name):
                self._ignored.add((name, found[name]))
        if len(new) <= most and time.time_ns() - changed > _SETTLED:
            self._seen = changed

    def read(self, text: CachedText) -> CachedText | None:
        """Return a text of `texts` with its tensor data, and mark the file as used. Return None if the file is missing
        or damaged."""
        name = self._files.get(text)
        if name is None:
            return None
        with self._checking(name):
            began = time.perf_counter()
            found = self._restored(*load(self.folder / name, [*text.drafters]))
            # Another process may have replaced the file with another version of the text.
            if found.drafters.keys() == text.drafters.keys() and np.array_equal(found.tokens, text.tokens):
                with suppress(OSError):
                    os.utime(self.folder / name)
                _LOG.debug("read a prefix of %d tokens in %.3f s", len(text.tokens), time.perf_counter() - began)
                return found
        self._forget(text)
        return None

    def offer(self, text: CachedText, replaces: Sequence[CachedText] = ()) -> None:
        """Write a text in the background.

        Args:
            text: The text.
            replaces: Texts, in the folder or in the queue, that become superfluous once this text is on disk.
        """
        with self._lock:
            self._queue = deque(job for job in self._queue if job.text not in replaces)
            self._queue.append(_Job(text, replaces, time.time_ns()))
            if self._thread is None:
                thread = threading.Thread(target=self._write_all, name="paceline-prefixes", daemon=True)
                with suppress(RuntimeError):  # the process is ending; `flush` writes the queue
                    thread.start()
                    self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait until all texts have been written. Return False if that takes longer than `seconds`."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def withdraw(self, text: CachedText) -> None:
        """Remove a text from the queue, so that it is not written."""
        with self._lock:
            self._queue = deque(job for job in self._queue if job.text is not text)

    def flush(self, texts: Sequence[tuple[CachedText, Sequence[CachedText]]], seconds: float) -> None:
        """Write these texts, and then the texts in the queue, as far as time allows.

        Args:
            texts: Pairs of a text and the texts that it replaces, the most recently used first.
            seconds: Maximum time.
        """
        until, now = time.monotonic() + seconds, time.time_ns()
        with self._lock:
            queued = [*self._queue]
            self._queue.clear()
        # Make each text a microsecond older than the text before it, so that the order of use is kept.
        jobs = [_Job(text, replaces, now - 1000 * i) for i, (text, replaces) in enumerate(texts)]
        self.wait(seconds)
        for job in (*jobs, *(job for job in queued if all(job.text is not one.text for one in jobs))):
            self._write(job, until)

    def _write_all(self) -> None:
        """Write the texts of the queue. This runs in a thread, which ends when the queue is empty."""
        while True:
            with self._lock:
                self._writing = None
                if not self._queue:
                    self._thread = None
                    return
                job = self._queue.popleft()
                self._writing = job.text
            self._write(job)

    def _write(self, job: _Job, until: float = inf) -> None:
        """Write a file, and remove the files that it replaces. If this fails, only this one file is lost."""
        text = job.text
        name = f"{self._key[:32]}-{_hash(text)}.prefix"
        keys = {drafter: key for drafter, (key, _) in self._drafters.items()}
        try:
            prepared = prepare(text, self._key, keys)
            if time.monotonic() > until:  # check this first: do not remove files for a text that will not be written
                raise TimeoutError
            if not self._make_room(prepared.size, job.used):
                return
            with self._unfinished(name) as file:
                write(file, prepared, until)
            os.utime(self.folder / name, ns=(job.used, job.used))
            self._add(name)
            for other in job.replaces:
                if (old := self._files.get(other)) and old != name:
                    self._remove(old)
                self._forget(other)
        except UnsupportedState as error:
            self._warn(str(error), "prefixes are not kept in %s: %s cannot be written", self.folder, error)
        except TimeoutError:
            self._warn("time", "there was no time to write all prefixes to %s", self.folder)
        except OSError as error:
            self._warn(error.errno, "cannot write a prefix to %s: %s. Replies are not affected", self.folder, error)
        except Exception:
            _LOG.exception("failed to write a prefix")

    @contextmanager
    def _unfinished(self, name: str) -> Iterator[BinaryIO]:
        """Open a temporary file. It gets its final name when the block ends, and is removed if the block raises an
        error."""
        path = self.folder / f"{name.removesuffix('.prefix')}.{os.getpid()}-{time.monotonic_ns()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                yield file
            os.replace(path, self.folder / name)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

    def _make_room(self, size: int, used: int) -> bool:
        """Remove the least recently used files until there is room for `size` bytes.

        Returns:
            True if there is room. Files that were last used after `used` are kept. If a file's time lies in the future,
            the clock was wrong when the file was written, so the file may be removed.
        """
        if size > self.limit:
            about = size / 2**30, self.folder, self.limit / 2**30
            self._warn("size", "a prefix of %.1f GiB is not kept in %s: the limit is %.1f GiB", *about)
            return False
        files = sorted(self._listed(), key=lambda one: one[1].st_mtime_ns)
        beyond, now = sum(state.st_size for _, state in files) + size - self.limit, time.time_ns()
        for entry, state in files:
            stale = _UNFINISHED.fullmatch(entry.name) and time.time() - state.st_mtime > _STALE
            older = _NAME.fullmatch(entry.name) and not used <= state.st_mtime_ns <= now
            if stale or (beyond > 0 and older):
                self._remove(entry.name)
                beyond -= state.st_size
        return beyond <= 0

    def _listed(self) -> list[tuple[os.DirEntry[str], os.stat_result]]:
        """Return all files in the folder, of all models and processes, finished or unfinished."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # another process may remove it at any time
                        found.append((entry, entry.stat(follow_symlinks=False)))
        return found

    def _add(self, name: str) -> bool:
        """Add a file to the texts. Return False if the file is invalid."""
        with self._checking(name):
            text = self._restored(read_header(self.folder / name))
            with self._lock:
                self._files = {one: file for one, file in self._files.items() if file != name} | {text: name}
            return True
        return False

    @contextmanager
    def _checking(self, name: str) -> Iterator[None]:
        """Catch errors while a file is read. Remove the file if it is damaged."""
        try:
            yield
        except FileNotFoundError:
            pass  # another process has removed it
        except (DamagedPrefix, ForeignPrefix, OSError) as error:
            _LOG.warning("the prefix %s is ignored: %s", self.folder / name, error)
            if isinstance(error, DamagedPrefix):
                self._remove(name)
        except Exception:  # for example no memory on a GPU
            _LOG.exception("failed to read the prefix %s", self.folder / name)

    def _restored(self, header: PrefixHeader, text: CachedText | None = None) -> CachedText:
        """Return a file's text, ready for the running model. `text`: The text with its tensor data, if it has been
        loaded.

        Raises:
            ForeignPrefix: If the file belongs to another model.
        """
        if header.key != self._key:
            raise ForeignPrefix("it belongs to another model")
        names = [name for name, (key, _) in self._drafters.items() if header.keys.get(name) == key]
        text = text or header.text(names)
        states = {name: saved for name, saved in text.drafters.items() if name in names}
        drafters = {name: self._drafters[name][1].restored(saved) for name, saved in states.items()}
        return replace(text, target=restored(self._cache, text.target), drafters=drafters)

    def _forget(self, text: CachedText) -> None:
        with self._lock:
            self._files = {one: name for one, name in self._files.items() if one is not text}

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._warn(error.errno, "cannot remove a prefix from %s: %s", self.folder, error)

    def _warn(self, reason: object, line: str, *about: object) -> None:
        """Log a warning once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _LOG.warning(line, *about)


def _hash(text: CachedText) -> str:
    return sha256(repr((text.adapter, text.prompt)).encode() + text.tokens.tobytes()).hexdigest()[:32]


def _check_folder(folder: Path) -> None:
    """Create the folder if it is missing. Raise `InvalidOption` if it cannot be used, or if other users can write to
    it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise InvalidOption(
            f"the folder of prefixes {folder} cannot be used: {error}", "Name another folder"
        ) from error
    if hasattr(os, "geteuid") and (state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o022):
        raise InvalidOption(
            f"other users can write to the folder of prefixes {folder}",
            f"Use a folder of your own: chmod 700 {folder}",
        )
