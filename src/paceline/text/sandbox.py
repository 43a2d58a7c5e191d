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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from typing import Any

from paceline.text.sandboxed import STARTED, find

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
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: set[Hashable] = set()
        self._lock, self._preparing = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the helper process if it does not run, without waiting for it."""
        if can_fork():
            with self._lock, suppress(Unfinished):  # the first job says so, if there is one
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
        with self._preparing:  # one caller does it for all
            with self._lock:
                before = self._started() if can_fork() else None
                if key in self._prepared:
                    return
            if can_fork():
                # Others may wait for it even where this caller's client has left.
                Context().run(self._ask, b"p", (job, argument(), 0.0, 0), time.monotonic() + 60)
            else:
                _here(job, argument())
            with self._lock:
                if self._control is before:
                    self._prepared.add(key)

    def _ask(self, kind: bytes, message: tuple[Any, ...], deadline: float, prepared: Hashable = None) -> Any:
        """Hand a job to the helper and return its result."""
        data = pickle.dumps(message)
        with _unfinished():  # by errors of the operating system: the helper has ended, there are no descriptors left
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    control = self._send(kind, theirs, prepared)
                ours.settimeout(max(0.01, deadline - time.monotonic()))
                ours.sendall(data)
                answer = _read(ours, deadline)
        if not answer.startswith(STARTED):
            self._forget(control)
            raise Unfinished
        return _result(answer[len(STARTED) :])

    def _send(self, kind: bytes, connection: socket.socket, prepared: Hashable) -> socket.socket:
        """Give the helper a connection, and start it again once if it has died. Returns the socket to that helper."""
        for _ in range(2):
            with self._lock:
                control = self._started()
                if prepared is not None and prepared not in self._prepared:
                    raise Unfinished
            with suppress(OSError):
                socket.send_fds(control, [kind], [connection.fileno()])
                return control
            self._forget(control)
        raise Unfinished

    def _forget(self, control: socket.socket) -> None:
        """Do without the helper behind this socket, if it is still the one."""
        with self._lock:
            if self._control is control and self._process is not None:
                self._process.kill()
                self._process.wait()
                self._control = self._process = None

    def _started(self) -> socket.socket:
        if self._control is None:
            self._prepared.clear()
            ours, theirs = socket.socketpair()
            code = f"import sys; sys.path[:] = {sys.path!r}; from paceline.text import sandboxed; "
            code += f"sandboxed.main({theirs.fileno()})"
            with theirs, _unfinished():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    # A thread's own heap reserves address space, which is limited in forks.
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                )
            self._control = ours
        return self._control


SANDBOX = Sandbox()
"""The one of this process."""


def can_fork() -> bool:
    """Whether jobs run in a process of their own here."""
    return hasattr(os, "fork") and bool(sys.executable) and not getattr(sys, "frozen", False)


@contextmanager
def _unfinished() -> Iterator[None]:
    """Turns an error of the operating system into `Unfinished`."""
    try:
        yield
    except OSError as error:
        raise Unfinished from error


def _read(connection: socket.socket, deadline: float) -> bytes:
    """All bytes up to the end."""
    data, abandoned = bytearray(), ABANDONED.get()
    connection.settimeout(_CHECK)
    while len(data) <= _ANSWER:
        try:
            part = connection.recv(1 << 16)
        except TimeoutError:
            if time.monotonic() > deadline or (abandoned and abandoned.is_set()):
                raise Unfinished from None
            continue
        if not part:
            return bytes(data)
        data += part
    raise OverLimit


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
