"""Runs jobs on untrusted input in separate processes, with limits on time and memory.

A chat template is code that the model's author wrote, and a grammar may take minutes and gigabytes to compile. Neither
can be stopped if it runs in a thread. So a small helper process (`main`) forks for each job, and the kernel ends a fork
that exceeds its limits or loses its connection. A fork takes about a millisecond, because the helper imports neither
torch nor numpy. It imports a job's module when the module is first needed.

If processes cannot fork (Windows), jobs run in this process without limits.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""An event that another thread sets when the result of this context is no longer needed."""

_CHECK_SECONDS = 0.05
"""Seconds between two checks of `ABANDONED`."""
_WAIT_FACTOR, _MIN_WAIT_SECONDS = 10.0, 5.0
"""A job must answer within `_WAIT_FACTOR` times its limit of processor time, but may always take at least
`_MIN_WAIT_SECONDS` seconds."""
_MAX_ANSWER_BYTES = 128 * 2**20
"""Maximum size of an answer in bytes."""
_BYTES_HEADER = struct.Struct(">cQ")
"""Header of an answer that consists of bytes: "b" and the number of bytes."""
_STARTED = b"!"
"""A fork sends this before it runs its job. If no answer follows, the job has exceeded its limits."""
_PRELOADED = "paceline.text.chat_template:render_compiled"
"""The function whose module the helper imports before the first job, so that forks need not import it."""


def is_abandoned() -> bool:
    """Return True if the result of this context is no longer needed (`ABANDONED`)."""
    abandoned = ABANDONED.get()
    return abandoned is not None and abandoned.is_set()


class JobFailed(Exception):
    """The job raised an error. The text of this exception is the error's message."""


class OverLimit(Exception):
    """The job exceeded its limit of processor time or memory."""


class Unfinished(Exception):
    """The job gave no result in time, because the machine was too busy or the result is no longer needed."""


class Sandbox:
    """The helper process. It starts with the first job or with `start`, and ends when this process ends."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: set[Hashable] = set()
        self._lock, self._preparing = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the helper process unless it is running, without waiting for it."""
        if can_fork():
            with self._lock, suppress(Unfinished):  # the first job will report the error
                self._started()

    def run(self, job: str, argument: Any, seconds: float, memory: int, prepared: Hashable = None) -> Any:
        """Call a function in a fork of the helper.

        Args:
            job: The function, "module:name".
            argument: The function's argument, which is pickled.
            seconds: Limit of processor time.
            memory: Maximum memory that the job may allocate, in bytes.
            prepared: Key of a `prepare` call that the job needs.

        Returns:
            The function's result, which must be bytes or JSON.

        Raises:
            JobFailed: If the function raises an error.
            OverLimit: If the job exceeds its limits.
            Unfinished: If the machine was too busy, or the result is no longer needed.
        """
        deadline = time.monotonic() + max(_WAIT_FACTOR * seconds, _MIN_WAIT_SECONDS)
        return self._ask(b"j", (job, argument, seconds, memory), deadline, prepared)

    def prepare(self, key: Hashable, job: str, argument: Callable[[], Any]) -> None:
        """Call a function in the helper itself, once for each key and without limits. Later forks inherit its effects.

        Use this only for trusted input.

        Args:
            key: Name of this preparation.
            job: The function, "module:name".
            argument: A function that returns the argument. It is called only if the argument is needed.

        Raises:
            JobFailed: If the function raises an error.
            Unfinished: If the machine was too busy.
        """
        with self._preparing:  # one caller prepares for all callers
            with self._lock:
                before = self._started() if can_fork() else None
                if key in self._prepared:
                    return
            # Other callers may wait for the result even if this caller's client has disconnected.
            Context().run(self._ask, b"p", (job, argument(), 0.0, 0), time.monotonic() + 60)
            with self._lock:
                if self._control is before:
                    self._prepared.add(key)

    def _ask(self, kind: bytes, message: tuple[Any, ...], deadline: float, prepared: Hashable = None) -> Any:
        """Send a job to the helper, and return its result. If processes cannot fork, run the job in this process."""
        if not can_fork():
            try:
                return _find(message[0])(message[1])
            except Exception as error:  # a job may raise any error
                raise JobFailed(f"{error}" or type(error).__name__) from error
        data = pickle.dumps(message)
        for _ in range(2):
            with _os_errors_as_unfinished():  # the helper may have ended, or there may be no file descriptors left
                (ours, theirs), (held, watched) = socket.socketpair(), socket.socketpair()
                with ours, held:
                    with theirs, watched:
                        control = self._send(kind, [theirs.fileno(), watched.fileno()], prepared)
                    ours.settimeout(max(0.01, deadline - time.monotonic()))
                    ours.sendall(data)
                    answer = _read(ours, deadline)
            if answer.startswith(_STARTED):
                return _result(memoryview(answer)[len(_STARTED) :])
            self._forget(control)  # the helper died before the job began, so try again with a new helper
        raise Unfinished

    def _send(self, kind: bytes, descriptors: list[int], prepared: Hashable) -> socket.socket:
        """Send a job's sockets to the helper, and return the helper's socket. If the helper has died, restart it
        once."""
        for _ in range(2):
            with self._lock:
                control = self._started()
                if prepared is not None and prepared not in self._prepared:
                    raise Unfinished
            with suppress(OSError):
                socket.send_fds(control, [kind], descriptors)
                return control
            self._forget(control)
        raise Unfinished

    def _forget(self, control: socket.socket) -> None:
        """Stop the helper that this socket belongs to, unless a new helper has replaced it."""
        with self._lock:
            if self._control is control and self._process is not None:
                self._process.kill()
                self._process.wait()
                self._control = self._process = None

    def _started(self) -> socket.socket:
        if self._control is None:
            self._prepared.clear()
            ours, theirs = socket.socketpair()
            code = f"import sys; sys.path[:] = {sys.path!r}; from paceline.text import sandbox; "
            code += f"sandbox.main({theirs.fileno()})"
            with theirs, _os_errors_as_unfinished():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    # Allow only one heap, because the heap of another thread would reserve address space, which is
                    # limited in forks.
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                )
            self._control = ours
        return self._control


SANDBOX = Sandbox()
"""The sandbox of this process."""


def can_fork() -> bool:
    """Return True if jobs can run in separate processes."""
    return hasattr(os, "fork") and bool(sys.executable) and not getattr(sys, "frozen", False)


@contextmanager
def _os_errors_as_unfinished() -> Iterator[None]:
    """Convert errors of the operating system to `Unfinished`."""
    try:
        yield
    except OSError as error:
        raise Unfinished from error


def _read(connection: socket.socket, deadline: float) -> bytes:
    """Read all bytes up to the end of the connection."""
    data = bytearray()
    connection.settimeout(_CHECK_SECONDS)
    while len(data) <= _MAX_ANSWER_BYTES:
        try:
            part = connection.recv(1 << 16)
        except TimeoutError:
            if time.monotonic() > deadline or is_abandoned():
                raise Unfinished from None
            continue
        if not part:
            return bytes(data)
        data += part
    raise OverLimit


def _result(answer: memoryview) -> Any:
    if answer[:1].tobytes() == b"b":
        if len(answer) < _BYTES_HEADER.size or len(answer) != _BYTES_HEADER.size + _BYTES_HEADER.unpack_from(answer)[1]:
            raise OverLimit
        return bytes(answer[_BYTES_HEADER.size :])
    try:
        reply = json.loads(bytes(answer))
    except ValueError:
        raise OverLimit from None
    if "failed" in reply:
        raise JobFailed(reply["failed"])
    return reply["result"]


# --- The helper process


def main(descriptor: int) -> None:
    """Run jobs from a Unix socket until its other end closes, which happens when the parent process ends.

    Each message consists of one byte and two sockets. "p" runs a function in this process, so that later forks inherit
    its effects, and "j" runs a function in a fork. The first socket transfers the job and its answer. The second socket
    transfers no data. It closes when the parent abandons the job, which ends the fork. Data would end the fork too
    (`_end_on_close`).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that forks do not become zombies when they end
    control = socket.socket(fileno=descriptor)
    _find(_PRELOADED)
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not kind or len(descriptors) != 2:
            return
        with (
            socket.socket(fileno=descriptors[0]) as connection,
            socket.socket(fileno=descriptors[1]) as watched,
        ):
            if kind == b"p":
                _answer(connection)
            elif os.fork() == 0:
                try:
                    _answer(connection, watched)
                finally:
                    os._exit(0)


def _answer(connection: socket.socket, watched: socket.socket | None = None) -> None:
    """Run a job and send its result. Bytes are sent as they are, other results as {"result": ...}, and an error as
    {"failed": text}. `watched`: The second socket, in forks.
    """
    try:
        with connection.makefile("rb") as sent:
            name, argument, seconds, memory = pickle.load(sent)  # safe, because only our parent process writes it
        if watched is not None:
            _end_on_close(watched)
            _limit(seconds, memory)
        connection.sendall(_STARTED)
        result = _find(name)(argument)
        if isinstance(result, bytes):
            connection.sendall(_BYTES_HEADER.pack(b"b", len(result)))
            connection.sendall(result)
            return
        reply = json.dumps({"result": result})
    except MemoryError:
        return  # without an answer, the parent reports that the job exceeded its limits
    except Exception as error:  # a job may raise any error; the parent raises it as `JobFailed`
        reply = json.dumps({"failed": f"{error}" or type(error).__name__})
    with suppress(OSError):
        connection.sendall(reply.encode())


def _end_on_close(watched: socket.socket) -> None:
    """Make the kernel end this process when the parent closes its end of the socket.

    The kernel then sends SIGIO. Without a handler, this signal ends the process, whatever code is running.
    """
    import fcntl  # exists only on Unix

    flags = fcntl.fcntl(watched, fcntl.F_GETFL)
    fcntl.fcntl(watched, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watched, fcntl.F_SETFL, flags | os.O_ASYNC)


def _limit(seconds: float, memory: int) -> None:
    """Make the kernel end this process after `seconds` of processor time, and limit its memory to `memory` bytes."""
    import resource  # exists only on Unix

    signal.setitimer(signal.ITIMER_PROF, seconds)
    pages = Path("/proc/self/statm")
    if pages.exists():
        now = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@lru_cache
def _find(name: str) -> Any:
    """Return the function with this name, "module:name"."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
