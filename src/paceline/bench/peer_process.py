"""A peer in its own process, with its own threads and memory. It sleeps between prompts.

The protocol is JSON lines. The first line contains the peer's name and setup, and the answer is {"ready"} or
{"unavailable"}. Each further line is a prompt, and its answer is a reply.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any

from paceline.bench.measure import MeasuredReply, SystemFailed
from paceline.bench.peers import PeerAnswer, PeerPrompt, PeerSetup, PeerUnavailable
from paceline.kernels.torch_variables import RUNNING


class PeerProcess:
    """Starts a peer and sends it prompts."""

    def __init__(self, peer: str, setup: PeerSetup) -> None:
        """Start a peer, given as module:function. Raise `PeerUnavailable` if it cannot run."""
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
        """Return the reply to a prompt. Raise `SystemFailed` if the peer fails."""
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
            raise SystemFailed(f"its process ended unexpectedly ({self._last_error_line()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output on stderr")


def _environment() -> dict[str, str]:
    """Return the environment of this process, with its import path and without Paceline's settings for torch.

    `GOMP_SPINCOUNT` would slow down a program that waits a thousand times per token.
    """
    kept = {name: value for name, value in os.environ.items() if name not in RUNNING}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _replies(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answer the lines of the protocol as the peer."""
    first = json.loads(next(lines))
    module, _, name = first["peer"].partition(":")
    try:
        answer: PeerAnswer = getattr(import_module(module), name)(PeerSetup(**first["setup"]))
    except PeerUnavailable as error:
        yield {"unavailable": [error.cause, error.fix]}
        return
    except Exception as error:  # other programs may raise any error
        traceback.print_exc()
        yield {"unavailable": [f"it could not start ({_one_line(error)})"]}
        return
    yield {"ready": True}
    for line in lines:
        yield _reply(answer, PeerPrompt(**json.loads(line)))


def _reply(answer: PeerAnswer, prompt: PeerPrompt) -> dict[str, Any]:
    try:
        reply = answer(prompt)
    except Exception as error:  # other programs may raise any error
        traceback.print_exc()
        return {"failed": _one_line(error)}
    return {"token_ids": [int(token) for token in reply.token_ids], "first": reply.first}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


def main() -> None:
    """Serve a peer on stdin and stdout. The output of its libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for reply in _replies(iter(sys.stdin.readline, "")):
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
