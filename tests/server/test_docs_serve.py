"""Commands of docs/how-to/serve.md and clients of docs/how-to/clients.md run against the first command's server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from typing import Any

import pytest

from paceline.server.apis.chat_completions import ChatRequest
from paceline.server.apis.completions import CompletionRequest
from tests.conftest import packaged_model
from tests.support.pages import DOCS, blocks

ADDRESS = "http://127.0.0.1:8000"
REFERENCE = (DOCS / "reference" / "server.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", (DOCS / "how-to" / "serve.md").read_text(), re.DOTALL)
CURLS = [block for block in SHELL if block.startswith("curl ")]


@dataclass
class Started:
    """A `paceline serve` process, and its output on stderr."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    listening: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if " at http" in line:
                self.listening.set()
        self.listening.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def address(self) -> str:
        found = re.search(r"at (http://[0-9.:]+)/v1", self.log)
        assert found, self.log
        return found[1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    with packaged_model("demo"):
        pass  # it is there now, or the test skips
    command = next(line for line in SHELL[0].splitlines() if line.startswith("paceline serve"))
    options = shlex.split(command.replace("--port 8000", "--port 0"))[1:]
    program = [sys.executable, "-c", "from paceline.cli import main; main()", *options]
    it = Started(subprocess.Popen(program, stderr=subprocess.PIPE, text=True))
    reader = threading.Thread(target=it.read, daemon=True)
    reader.start()
    try:
        assert it.listening.wait(120)
        yield it
        assert it.stop() == 0
    finally:
        it.process.kill()
        it.process.wait()
        reader.join(10)


def curl(started: Started, block: str) -> str:
    if shutil.which("curl") is None and not os.environ.get("CI"):
        pytest.skip("there is no curl")
    command = block.replace(ADDRESS, started.address).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(started: Started, block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(compile(block.replace(ADDRESS, started.address), "clients.md", "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.model
def test_the_commands(started: Started) -> None:
    chat, stream, text, schema, call, tokens = (curl(started, block) for block in CURLS)
    assert json.loads(chat)["choices"][0]["message"]["content"]
    *_, usage, done = (line for line in stream.splitlines() if line)
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] > 1
    assert json.loads(text)["usage"]["speculation"]["drafter"] == "ngram"
    assert set(json.loads(json.loads(schema)["choices"][0]["message"]["content"])) == {"name", "large"}
    (made,) = json.loads(call)["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(made["function"]["arguments"])) == {"city"}
    assert json.loads(tokens)["count"] == len(json.loads(tokens)["tokens"]) > 3


@pytest.mark.slow
@pytest.mark.model
def test_the_clients(started: Started) -> None:
    openai, *others = blocks("how-to/clients.md")
    names = python(started, openai)
    assert names["reply"].choices[0].message.content
    assert names["reply"].usage.speculation["drafted"] == 0
    assert names["chunk"].usage.speculation["rounds"] > 0
    assert isinstance(names["city"].choices[0].message.parsed, names["City"])
    for block, module in zip(others, ("langchain_openai", "litellm"), strict=True):
        assert module in block
        if find_spec(module):
            python(started, block)


@pytest.mark.slow
@pytest.mark.model
def test_the_log_has_requests_without_their_text(started: Started) -> None:
    curl(started, CURLS[0])
    assert re.search(r"INFO \w{32} POST /v1/chat/completions 200 \d+ ms", started.log)
    assert "sky" not in started.log


@pytest.mark.slow
@pytest.mark.model
def test_every_metric_is_told(started: Started) -> None:
    with urllib.request.urlopen(f"{started.address}/metrics") as answer:
        told = re.findall(r"^# TYPE (\S+) (\w+)", answer.read().decode(), re.MULTILINE)
    names = {name for name, kind in told if not name.endswith("_created")}
    assert names == set(re.findall(r"`((?:vllm|paceline):\w+)`", REFERENCE))


def test_every_parameter_is_told() -> None:
    told = REFERENCE[REFERENCE.index("## Parameters") : REFERENCE.index("## What speculation did")]
    told += (DOCS / "reference" / "fields.md").read_text()
    for kind in (ChatRequest, CompletionRequest):
        names = [field.alias or name for name, field in kind.model_fields.items()]
        assert not [name for name in names if f"`{name}`" not in told]
