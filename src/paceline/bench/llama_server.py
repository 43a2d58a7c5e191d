"""llama.cpp's server with its speculation: n-grams, and the same draft model as Paceline."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from tempfile import TemporaryFile
from typing import Any

from paceline.bench.measure import FirstTokenTimer, MeasuredReply
from paceline.bench.peers import PeerAnswer, PeerPrompt, PeerSetup, PeerUnavailable, gguf

PROGRAM = "llama-server"
START_SECONDS = 120
SPECULATION = {
    "": (),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "draft": ("--spec-type", "draft-simple"),
}
"""Drafter -> command-line options. All other options have the program's defaults."""


def llama_server(setup: PeerSetup) -> PeerAnswer:
    """Start llama-server, which must be on PATH, once for each kind of speculation that is measured."""
    program, path = shutil.which(PROGRAM), gguf(setup, PROGRAM)
    if program is None:
        raise PeerUnavailable(f"{PROGRAM} is not on PATH", "Build it as described in benchmarks/README.md")

    @cache
    def server(drafter: str) -> _LlamaServer:
        draft = ("-md", setup.draft, "-td", str(setup.threads)) if drafter == "draft" else ()
        threads = ("-t", str(setup.threads), "-tb", str(setup.threads))
        # With one slot and without a prompt cache, only ngram-mod remembers anything from an earlier prompt.
        slots = ("-np", "1", "-c", str(setup.positions + 64), "--cache-ram", "0", "--no-webui")
        return _LlamaServer([program, "-m", path, *threads, *slots, *SPECULATION[drafter], *draft])

    def answer(prompt: PeerPrompt) -> MeasuredReply:
        return server(prompt.drafter).complete(prompt, setup)

    server("")
    return answer


class _LlamaServer:
    """A llama-server process on its own port. It ends with the process that started it."""

    def __init__(self, command: list[str]) -> None:
        """Start the server and wait until the model is loaded. Raise `PeerUnavailable` if that fails."""
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self._port = free.getsockname()[1]
        self._log = TemporaryFile()  # noqa: SIM115  # read when the server fails to start
        address = ("--host", "127.0.0.1", "--port", str(self._port))
        self._process = subprocess.Popen(
            [*_killed_with_parent(), *command, *address], stdout=self._log, stderr=self._log
        )
        self._wait()

    def complete(self, prompt: PeerPrompt, setup: PeerSetup) -> MeasuredReply:
        """Return the reply to a rendered prompt.

        Raises:
            OSError: If the connection fails.
            RuntimeError: If the server answers with an error.
        """
        timer, ids = FirstTokenTimer(), []
        asked = {"content": prompt.prompt, "add_special": False, "parse_special": True}
        sampling = {"temperature": prompt.temperature, "seed": prompt.seed, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        told = {"stream": True, "return_tokens": True, "cache_prompt": False, "repeat_penalty": 1.0}
        tokens = json.loads(b"".join(self._post("/tokenize", asked)))["tokens"]
        for line in self._post("/completion", {"prompt": tokens, "n_predict": setup.tokens, **sampling, **told}):
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event.get("tokens"):
                    timer.mark()
                    ids += event["tokens"]
        return MeasuredReply(ids[: setup.tokens], timer.seconds)

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Send a request and yield the lines of the answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{path} answered {response.status}: {response.read(300).decode(errors='replace')}")
            yield from response

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                suppress(OSError),
                closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection,
            ):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.1)
        self._process.kill()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        raise PeerUnavailable(
            f"{PROGRAM} did not start ({''.join(last) or 'no output'})", "Run it by hand to see the reason"
        )


def _killed_with_parent() -> tuple[str, ...]:
    """Return a command prefix that ends the server when this process is killed. Empty without util-linux's
    `setpriv`."""
    return ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
