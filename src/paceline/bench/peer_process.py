"""A peer in a process of its own, with its own threads and memory; it sleeps while it is not asked.

The protocol is JSON lines: first the peer's name and setup, answered by {"ready"} or {"unavailable"}; then one reply
per prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

from paceline.bench.measure import MeasuredReply, SystemFailed
from paceline.bench.peers import PeerAnswer, PeerPrompt, PeerSetup, PeerUnavailable


class PeerProcess:
    """Starts a peer, given as module:function, and sends it prompts."""

    def __init__(self, peer: str, setup: PeerSetup) -> None:
        """Raises `PeerUnavailable`."""
        self._errors = TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            env=_environment(),
        )
        try:
            answer = self._exchange({"peer": peer, "setup": asdict(setup)})
            if "unavailable" in answer:
                raise PeerUnavailable(*answer["unavailable"])
        except BaseException:
            self.close()
            raise

    def ask(self, prompt: PeerPrompt) -> MeasuredReply:
        """Return the reply. Raises `SystemFailed`."""
        answer = self._exchange(asdict(prompt))
        if "failed" in answer:
            raise SystemFailed(answer["failed"])
        return MeasuredReply(answer["token_ids"], answer["first"])

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unread data
                if pipe:
                    pipe.close()
        self._process.wait()
        self._errors.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:  # the process has ended
            line = ""
        if not line:
            raise SystemFailed(f"its process ended by itself ({self._last_error_line()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output on stderr")


def _environment() -> dict[str, str]:
    """This process's import path, and its environment without GOMP_SPINCOUNT: what `cli.main` sets suits Paceline, but
    not a program that waits a thousand times per token."""
    kept = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _replies(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the peer's end of the protocol until the lines end."""
    first = json.loads(next(lines))
    module, _, name = first["peer"].partition(":")
    try:
        answer: PeerAnswer = getattr(import_module(module), name)(PeerSetup(**first["setup"]))
    except PeerUnavailable as error:
        yield {"unavailable": [error.cause, error.fix]}
        return
    except Exception as error:  # another program may raise anything
        yield {"unavailable": [f"it could not start ({_one_line(error)})"]}
        return
    yield {"ready": True}
    for line in lines:
        yield _reply(answer, PeerPrompt(**json.loads(line)))


def _reply(answer: PeerAnswer, prompt: PeerPrompt) -> dict[str, Any]:
    try:
        reply = answer(prompt)
    except Exception as error:
        return {"failed": _one_line(error)}
    return {"token_ids": [int(token) for token in reply.token_ids], "first": reply.first}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


def main() -> None:
    """Serve a peer on stdin and stdout; what its libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for reply in _replies(iter(sys.stdin.readline, "")):
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
