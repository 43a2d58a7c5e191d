"""Jobs on untrusted input, in separate processes with limits on time and memory.

A chat template is code from the model's author, and a grammar may take minutes and gigabytes to compile; neither can be
stopped inside a thread. So a small helper process, without torch and weights, forks once per job; the kernel ends a
fork that exceeds its limits or whose connection is closed. A fork takes about a millisecond.

Where processes cannot fork (Windows), jobs run in this process without limits.
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
"""Set by another thread once the result of this context is no longer wanted."""

_CHECK = 0.05
"""Seconds between two checks of `ABANDONED`."""
_FACTOR, _LEAST = 10.0, 5.0
"""A job must answer within this many times its processor time, at least within this many seconds."""
_ANSWER = 64 * 2**20
"""Maximum size of an answer in bytes."""


class JobFailed(Exception):
    """The job raised an error; the text is the error's."""


class OverLimit(Exception):
    """The job exceeded its limit of processor time or memory."""


class Unfinished(Exception):
    """The job ended without a result within its limits: the machine was too busy, or the result is no longer wanted."""


class Sandbox:
    """The helper process, which starts with the first job or `start`, and ends with this process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: set[Hashable] = set()
        self._lock, self._preparing = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the helper process unless it runs, without waiting for it."""
        if can_fork():
            with self._lock, suppress(Unfinished):  # the first job will report it
                self._started()

    def run(self, job: str, argument: Any, seconds: float, memory: int, prepared: Hashable = None) -> Any:
        """Return the result of the function `job` ("module:name") on `argument`, computed in a fork of the helper.

        `argument` is pickled, and the result must be JSON. `seconds`: processor time. `memory`: bytes that the job may
        allocate. `prepared`: the key of a `prepare` call that the job relies on. Raises `JobFailed` for an error in the
        job, `OverLimit`, `Unfinished`.
        """
        if not can_fork():
            return _run_inline(job, argument)
        deadline = time.monotonic() + max(_FACTOR * seconds, _LEAST)
        return self._ask(b"j", (job, argument, seconds, memory), deadline, prepared)

    def prepare(self, key: Hashable, job: str, argument: Callable[[], Any]) -> None:
        """Run `job` once per `key` in the helper itself, without limits: later forks inherit its effects.

        Only for trusted input. `argument` is called if it is needed. Raises `JobFailed`, `Unfinished`.
        """
        with self._preparing:  # one caller does it for all
            with self._lock:
                before = self._started() if can_fork() else None
                if key in self._prepared:
                    return
            if can_fork():
                # Others may wait for it even if this caller's client has disconnected.
                Context().run(self._ask, b"p", (job, argument(), 0.0, 0), time.monotonic() + 60)
            else:
                _run_inline(job, argument())
            with self._lock:
                if self._control is before:
                    self._prepared.add(key)

    def _ask(self, kind: bytes, message: tuple[Any, ...], deadline: float, prepared: Hashable = None) -> Any:
        """Hand a job to the helper and return its result."""
        data = pickle.dumps(message)
        with _os_errors_as_unfinished():  # the helper has ended, or no descriptors are left
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
        """Send the helper a connection, restarting it once if it has died. Return the socket to the helper."""
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
        """Stop the helper behind this socket, if it is still in use."""
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
            with theirs, _os_errors_as_unfinished():
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
"""The sandbox of this process."""


def can_fork() -> bool:
    """Whether jobs can run in processes of their own."""
    return hasattr(os, "fork") and bool(sys.executable) and not getattr(sys, "frozen", False)


@contextmanager
def _os_errors_as_unfinished() -> Iterator[None]:
    """Turn errors of the operating system into `Unfinished`."""
    try:
        yield
    except OSError as error:
        raise Unfinished from error


def _read(connection: socket.socket, deadline: float) -> bytes:
    """Return all bytes up to the end of the connection."""
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
        reply = json.loads(answer)
    except ValueError:
        raise OverLimit from None
    if "failed" in reply:
        raise JobFailed(reply["failed"])
    return reply["result"]


def _run_inline(job: str, argument: Any) -> Any:
    try:
        return find(job)(argument)
    except Exception as error:
        raise JobFailed(f"{error}" or type(error).__name__) from error
