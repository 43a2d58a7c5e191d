"""Jobs on input from strangers, in a process of their own with limits of time and memory.

A chat template is code of whoever made the model, and a grammar may take minutes and gigabytes to compile. Neither can
be stopped inside a thread. So a small helper process, without torch and without weights, forks once per job; the
kernel ends a fork that goes over its limits, and so does closing its connection. A fork takes about a millisecond.

Where a process cannot fork (Windows), jobs run in this process and have no limits.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from paceline.sandboxed import STARTED, find

ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""Set, by another thread, once nobody waits any more for what this context computes."""

_CHECK = 0.05
"""Seconds between two looks at `ABANDONED`."""
_FACTOR, _LEAST = 10.0, 5.0
"""A job may wait for the processor: it has this many times its processor time, or this many seconds, to answer."""
_ANSWER = 64 * 2**20
"""Bytes of an answer at most."""


class JobFailed(Exception):
    """The job raised an error; the text is the error's."""


class OverLimit(Exception):
    """The job took more processor time or memory than it may."""


class Unfinished(Exception):
    """The job was ended within its limits: the machine was too busy for it, or its result is no longer wanted."""


class Sandbox:
    """The helper process. It starts with the first job, or with `start`, and ends with this process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._prepared: set[Hashable] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the helper process if it does not run, without waiting for it."""
        if can_fork():
            with self._lock:
                self._started()

    def run(self, job: str, argument: Any, seconds: float, memory: int, prepared: Hashable = None) -> Any:
        """Return what the function `job` ("module:name") makes of `argument` in a fork of the helper.

        `argument` is pickled, and the result must be JSON. `seconds`: processor time. `memory`: bytes that the job may
        allocate. `prepared`: the key under which `prepare` made what the job needs. Raises `JobFailed` for an error of
        the job's, `OverLimit`, `Unfinished`.
        """
        if not can_fork():
            return _here(job, argument)
        deadline = time.monotonic() + max(_FACTOR * seconds, _LEAST)
        return self._ask(b"j", (job, argument, seconds, memory), deadline, prepared)

    def prepare(self, key: Hashable, job: str, argument: Callable[[], Any]) -> None:
        """Run `job` once per `key` in the helper itself, without limits: forks made later find what it leaves behind.

        For input that this process trusts. `argument` is called where it is needed. Raises `JobFailed`, `Unfinished`.
        """
        with self._lock:
            if can_fork():
                self._started()
            if key in self._prepared:
                return
        if can_fork():
            self._ask(b"p", (job, argument(), 0.0, 0), time.monotonic() + 60)
        else:
            _here(job, argument())
        with self._lock:
            self._prepared.add(key)

    def _ask(self, kind: bytes, message: tuple[Any, ...], deadline: float, prepared: Hashable = None) -> Any:
        """Hand a job to the helper and return its result."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(kind, theirs, prepared)
            try:
                ours.settimeout(max(0.01, deadline - time.monotonic()))
                ours.sendall(pickle.dumps(message))
                answer = _read(ours, deadline)
            except OSError:  # it took too long, or ended
                raise Unfinished from None
        if not answer.startswith(STARTED):
            self._forget()
            raise Unfinished
        return _result(answer[len(STARTED) :])

    def _send(self, kind: bytes, connection: socket.socket, prepared: Hashable) -> None:
        """Give the helper a connection, and start it again once if it has died."""
        for _ in range(2):
            with self._lock:
                control = self._started()
                if prepared is not None and prepared not in self._prepared:
                    raise Unfinished
            with suppress(OSError):
                socket.send_fds(control, [kind], [connection.fileno()])
                return
            self._forget()
        raise Unfinished

    def _forget(self) -> None:
        with self._lock:
            self._control = None

    def _started(self) -> socket.socket:
        if self._control is None:
            self._prepared.clear()
            self._control, theirs = socket.socketpair()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from paceline.sandboxed import main; main({theirs.fileno()})"
            )
            with theirs:
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    # A thread's own heap reserves address space, which is limited in forks.
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                )
        return self._control


SANDBOX = Sandbox()
"""The one of this process."""


def can_fork() -> bool:
    """Whether jobs run in a process of their own here."""
    return hasattr(os, "fork") and bool(sys.executable)


def _read(connection: socket.socket, deadline: float) -> bytes:
    """All bytes up to the end, b"" if they are too many."""
    data, abandoned = bytearray(), ABANDONED.get()
    while len(data) <= _ANSWER:
        while not select.select([connection], [], [], _CHECK)[0]:
            if time.monotonic() > deadline or (abandoned and abandoned.is_set()):
                raise Unfinished
        part = connection.recv(1 << 16)
        if not part:
            return bytes(data)
        data += part
    return b""


def _result(answer: bytes) -> Any:
    try:
        said = json.loads(answer)
    except ValueError:
        raise OverLimit from None
    if "failed" in said:
        raise JobFailed(said["failed"])
    return said["made"]


def _here(job: str, argument: Any) -> Any:
    try:
        return find(job)(argument)
    except Exception as error:
        raise JobFailed(f"{error}" or type(error).__name__) from error
