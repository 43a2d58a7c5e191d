"""Servers under test. Each is a child process on a free local port."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.support.load_client import HOST, Client


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def paceline_serve(arguments: str) -> list[str]:
    """Return the command that runs `paceline serve ARGUMENTS` from this checkout."""
    return [sys.executable, "-m", "paceline", "serve", *shlex.split(arguments)]


class ServerProcess:
    """A listening process. As a context manager, it stops at the end."""

    def __init__(self, name: str, command: Sequence[str], port: int = 0, patience: float = 180.0) -> None:
        """Run `command --host 127.0.0.1 --port PORT` and wait at most `patience` seconds for /health.

        Raise `RuntimeError` with the end of the log if it does not answer.
        """
        self.name, self.port, self.command = name, port or free_port(), list(command)
        self._log = tempfile.NamedTemporaryFile("w+", prefix="serve-", suffix=".log", delete=False)  # noqa: SIM115
        source = str(Path(__file__).resolve().parents[2] / "src")
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._ps = psutil.Process(self.process.pid)
        try:
            self._wait(patience)
        except BaseException:
            self.kill()
            raise

    def _wait(self, patience: float) -> None:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self.process.returncode}:\n{self.log()[-3000:]}")
            if asyncio.run(self.healthy()):
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} did not answer /health within {patience:g} s:\n{self.log()[-3000:]}")

    async def healthy(self) -> bool:
        """Return True if /health answers 200."""
        client = Client(self.port, timeout=5.0)
        try:
            return (await client.ask("/health")).status == 200
        finally:
            client.close()

    def model(self) -> str:
        """Return the first model that the server lists."""

        async def ask() -> str:
            client = Client(self.port, timeout=10.0)
            found = await client.ask("/v1/models")
            client.close()
            return str(found.json()["data"][0]["id"])

        return asyncio.run(ask())

    def log(self) -> str:
        """Return the output so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    @property
    def resident(self) -> int:
        """Bytes of resident memory, including child processes."""
        return sum(_resident(process) for process in [self._ps, *self._ps.children(recursive=True)])

    @property
    def processor_seconds(self) -> float:
        """CPU time so far, over all threads."""
        times = self._ps.cpu_times()
        return float(times.user + times.system)

    @property
    def descriptors(self) -> int:
        """Number of open files and sockets."""
        return int(self._ps.num_fds())

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self, deadline: float = 60.0) -> int | None:
        """Send SIGTERM, then `wait`."""
        if self.process.poll() is None:
            self.terminate()
        return self.wait(deadline)

    def wait(self, deadline: float) -> int | None:
        """Return the exit code, or None if the process had to be killed after `deadline` seconds."""
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._close()
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        """Remove the log unless the server failed."""
        if not self._log.closed:
            self._log.close()
            if self.process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM):
                Path(self._log.name).unlink(missing_ok=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
