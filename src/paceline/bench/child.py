"""A peer in a process of its own, whose threads and memory are nobody else's: while it is not asked, it sleeps.

Lines of JSON: first who it is and its job, answered by {"ready"} or {"missing"}; then prompts, answered one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

from paceline.bench.measure import Lost, MeasuredReply
from paceline.bench.peers import Missing, PeerAnswer, PeerPrompt, PeerSetup


class Child:
    """The near end. Begins a peer, given as module:function, and asks it."""

    def __init__(self, peer: str, job: PeerSetup) -> None:
        """Raises `Missing` if the peer cannot do the job."""
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
            said = self._tell({"peer": peer, "job": asdict(job)})
            if "missing" in said:
                raise Missing(*said["missing"])
        except BaseException:
            self.close()
            raise

    def ask(self, ask: PeerPrompt) -> MeasuredReply:
        """Its reply. Raises `Lost`."""
        said = self._tell(asdict(ask))
        if "failed" in said:
            raise Lost(said["failed"])
        return MeasuredReply(said["token_ids"], said["first"])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it never read
                if pipe:
                    pipe.close()
        self._process.wait()
        self._errors.close()

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """One line there, one back."""
        near, far = self._process.stdin, self._process.stdout
        assert near
        assert far
        try:
            near.write(json.dumps(message) + "\n")
            near.flush()
            line = far.readline()
        except OSError:  # nobody reads any more
            line = ""
        if not line:
            raise Lost(f"its process ended by itself ({self._last_words()})")
        said: dict[str, Any] = json.loads(line)
        return said

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _environment() -> dict[str, str]:
    """What this process can import, the other can too. How long its threads spin is its own affair: what `cli.main`
    sets suits Paceline, and not a program that waits a thousand times per token."""
    own = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return own | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(lines: Iterator[str], say: Callable[[dict[str, Any]], None]) -> None:
    """The far end: does what the lines say until they end."""
    order = json.loads(next(lines))
    module, _, name = order["peer"].partition(":")
    try:
        answer: PeerAnswer = getattr(import_module(module), name)(PeerSetup(**order["job"]))
    except Missing as error:
        say({"missing": [error.cause, error.fix]})
        return
    except Exception as error:  # whatever another program raises
        say({"missing": [f"it could not begin ({_shown(error)})"]})
        return
    say({"ready": True})
    for line in lines:
        say(_answered(answer, PeerPrompt(**json.loads(line))))


def _answered(answer: PeerAnswer, ask: PeerPrompt) -> dict[str, Any]:
    try:
        reply = answer(ask)
    except Exception as error:  # whatever another program raises
        return {"failed": _shown(error)}
    return {"token_ids": [int(token) for token in reply.token_ids], "first": reply.first}


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


def main() -> None:
    """Libraries print to stdout, which belongs to the answers: their lines go to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    serve(iter(sys.stdin.readline, ""), say)


if __name__ == "__main__":
    main()
