"""Helper process of `paceline.text.sandbox`: forks once per job, and limits the fork's time and memory.

It imports neither torch nor numpy, so that forks are cheap; a job's module is imported when it is first used.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

_FIRST = "paceline.text.chat_template:render_compiled"
"""Imported before the first job, so that no fork has to."""

STARTED = b"!"
"""Sent before a job runs: one that ends without an answer after this has exceeded its limits."""


def main(descriptor: int) -> None:
    """Take jobs from a Unix socket until its other end closes, which happens when the parent process ends.

    Each message is one byte and a socket of its own: "p" runs a function in this process, so that later forks
    find its result; "j" runs one in a fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave no zombies
    control = socket.socket(fileno=descriptor)
    find(_FIRST)
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind or not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if kind == b"p":
                _answer(connection)
            elif os.fork() == 0:
                try:
                    _answer(connection, limited=True)
                finally:
                    os._exit(0)


def _answer(connection: socket.socket, limited: bool = False) -> None:
    """Run one job and send its result as JSON: {"result": ...} or {"failed": text}."""
    try:
        with connection.makefile("rb") as sent:
            name, argument, seconds, memory = pickle.load(sent)  # written by our own parent
        if limited:
            _end_on_close(connection)
            _limit(seconds, memory)
        connection.sendall(STARTED)
        reply = json.dumps({"result": find(name)(argument)})
    except MemoryError:
        return  # the parent reports a job without an answer as over its limits
    except Exception as error:
        reply = json.dumps({"failed": f"{error}" or type(error).__name__})
    _end_on_close(connection, False)
    with suppress(OSError):
        connection.sendall(reply.encode())


def _end_on_close(connection: socket.socket, armed: bool = True) -> None:
    """Let the kernel end this process when the parent closes its end of the connection.

    It sends SIGIO, which ends a process that does not handle it, whatever code it runs.
    """
    import fcntl  # Unix alone has it, and this module is imported everywhere

    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if armed else flags & ~os.O_ASYNC)


def _limit(seconds: float, memory: int) -> None:
    """Let the kernel end this process after `seconds` of processor time; fail allocations past `memory` more bytes."""
    import resource  # Unix alone has it, and this module is imported everywhere

    signal.setitimer(signal.ITIMER_PROF, seconds)
    pages = Path("/proc/self/statm")
    if pages.exists():
        now = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@lru_cache
def find(name: str) -> Any:
    """Return the function called "module:name"."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)
