"""Servers to be measured or maltreated: begun as child processes on free ports of the loopback, and stopped."""

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
from common import fail
from serve_client import HOST, Client


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def ours(words: str) -> list[str]:
    """The command that serves with this checkout's Paceline; `words` as they would be typed after `paceline serve`."""
    return [sys.executable, "-c", "from paceline.cli import main; main()", "serve", *shlex.split(words)]


class Server:
    """A process that listens. As a context it is stopped at the end, in any case."""

    def __init__(self, name: str, command: Sequence[str], port: int = 0, patience: float = 180.0) -> None:
        """Runs `command --host 127.0.0.1 --port PORT`, waits for /health, at most `patience` seconds; ends the program
        if it never comes."""
        self.name, self.port, self.command = name, port or free_port(), list(command)
        self._log = tempfile.NamedTemporaryFile("w+", prefix="serve-", suffix=".log", delete=False)  # noqa: SIM115
        source = str(Path(__file__).resolve().parents[1] / "src")
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
                fail(f"{self.name} ended with code {self.process.returncode}:\n{self.log()[-3000:]}")
            if asyncio.run(self.healthy()):
                return
            time.sleep(0.1)
        fail(f"{self.name} did not answer /health within {patience:g} s:\n{self.log()[-3000:]}")

    async def healthy(self) -> bool:
        """Whether /health answers 200."""
        client = Client(self.port, timeout=5.0)
        try:
            return (await client.ask("/health")).status == 200
        finally:
            client.close()

    def log(self) -> str:
        """What it has written so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        return int(self._ps.memory_info().rss)

    @property
    def processor_seconds(self) -> float:
        """CPU time that it took so far, all threads together."""
        times = self._ps.cpu_times()
        return float(times.user + times.system)

    @property
    def descriptors(self) -> int:
        """Files and sockets that it has open."""
        return int(self._ps.num_fds())

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self, deadline: float = 60.0) -> int | None:
        """SIGTERM, then `wait`."""
        if self.process.poll() is None:
            self.terminate()
        return self.wait(deadline)

    def wait(self, deadline: float) -> int | None:
        """The exit code; None if it had to be killed after `deadline` seconds."""
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._close()
        return code

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        """Removes the log, but for a server that failed."""
        if not self._log.closed:
            self._log.close()
            if self.process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM):
                Path(self._log.name).unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
