"""A local model as an endpoint: `paceline serve` as a child process, for the duration of the test."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from paceline.certify.transport import EndpointError, Http

_START_SECONDS = 600.0


@contextmanager
def serve_locally(model: str, drafter: str, against: str) -> Iterator[str]:
    """Serve a model on a free local port.

    Args:
        model: Model, as for `paceline serve`.
        drafter: Its drafter.
        against: Another drafter to load, or "none".

    Yields:
        The address of the API.

    Raises:
        EndpointError: If the server does not start.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", model, "--drafter", drafter, "--port", str(port), "-q"]
    command += [] if against == "none" else ["--also", against]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait(process, f"http://127.0.0.1:{port}/v1")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], base: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EndpointError(f"the server has exited with code {process.returncode}", "Read the lines above")
        with suppress(EndpointError):
            if Http(base, seconds=10)("GET", "/models")[0] == 200:
                return
        time.sleep(0.2)
    raise EndpointError(f"the model was not ready after {_START_SECONDS:.0f} s", "Start the server yourself")


def request_fields(drafter: str, against: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of requests for both sides."""
    plain = "off" if against == "none" else {"drafter": against}
    return {"speculation": {"drafter": drafter}}, {"speculation": plain}
