"""Systems that serve.py measures: Paceline's server, llama.cpp's server, OpenVINO GenAI in its own process."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from common import fail
from tests.support.load_client import Load, Reply, closed_loop
from tests.support.server_process import ServerProcess

from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint

OFF, AUTO, LLAMA, OPENVINO = "off", "auto", "llama.cpp", "openvino"
OURS = (OFF, AUTO)
"""The systems that use Paceline's server, named after the field `speculation` of their requests."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request for at most `tokens` tokens. A question always has the same seed, and therefore the same reply."""

    question: str | int
    text: str
    tokens: int
    temperature: float
    seed: int


class System(Protocol):
    """A server, or a program that answers many requests at once."""

    name: str

    def answer(self, requests: Sequence[LoadRequest], clients: int, spacing: float) -> Load:
        """Answer all requests in a closed loop."""
        ...

    def processor_seconds(self) -> float:
        """Return the CPU time of the server so far."""
        ...


class Http:
    """A server, with fields that are added to all requests."""

    def __init__(self, name: str, server: ServerProcess, extra: Mapping[str, Any]) -> None:
        self.name, self._server = name, server
        self._extra = {"model": server.model(), **extra}

    def answer(self, requests: Sequence[LoadRequest], clients: int, spacing: float) -> Load:
        bodies = [self.body(request) for request in requests]
        return asyncio.run(closed_loop(self._server.port, "/v1/chat/completions", bodies, clients, spacing))

    def body(self, request: LoadRequest) -> bytes:
        said = {
            "messages": [{"role": "user", "content": request.text}],
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(said | self._extra).encode()

    def processor_seconds(self) -> float:
        return self._server.processor_seconds


LLAMA_EXTRA = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
"""Fields that disable the prefix cache and all sampling options except temperature."""


def llama_command(program: Path, gguf: Path, threads: int, slots: int, context: int) -> list[str]:
    """Return the command of llama-server: continuous batching of `slots` sequences of `context` positions each."""
    many = ["-np", str(slots), "-c", str(slots * context), "-cb"]
    return [str(program), "-m", str(gguf), "-t", str(threads), "-tb", str(threads), *many, "--cache-ram", "0"]


class OpenVino:
    """OpenVINO GenAI (see serve_openvino.py). Paceline renders its prompts, so that the chat template is the same."""

    name = OPENVINO

    def __init__(self, python: Path, gguf: Path, threads: int) -> None:
        checkpoint = open_checkpoint(gguf)
        self._tokenizer = checkpoint.tokenizer
        self._eos = list(eos_token_ids(checkpoint.config, checkpoint.generation, checkpoint.tokenizer))
        script = Path(__file__).with_name("serve_openvino.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(gguf), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._ps = psutil.Process(self._process.pid)
        self.version = str(self._receive()["ready"])

    def answer(self, requests: Sequence[LoadRequest], clients: int, spacing: float) -> Load:
        before = [{"prompt": self._render(a.text), "tokens": a.tokens} for a in requests]
        how = [{"temperature": a.temperature, "seed": a.seed} for a in requests]
        job = {"clients": clients, "spacing": spacing, "eos": self._eos}
        job["requests"] = [p | h for p, h in zip(before, how, strict=True)]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        said = self._receive()
        replies = [Reply(**reply) for reply in said.pop("replies")]
        for reply in replies:
            reply.error = "" if reply.finish == "finished" and reply.tokens else f"status {reply.finish}"
        return Load(replies, client_seconds=0.0, **said)

    def _render(self, text: str) -> str:
        return self._tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            fail(f"OpenVINO's process ended with code {self._process.wait()}")
        return dict(json.loads(line))

    def processor_seconds(self) -> float:
        times = self._ps.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
