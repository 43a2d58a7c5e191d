"""`torchrun -m paceline serve`: two processes, one model from a GGUF file, one server."""

from __future__ import annotations

import json
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints.test_gguf import Q, write
from tests.server.server_process import ServerProcess, free_port


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PACELINE_CONFIG", "")
    write(tmp_path / "tiny.gguf", kind=Q.Q8_0)
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command = [*started, "-m", "paceline", "serve", str(tmp_path / "tiny.gguf"), "--drafter", "suffix", "--grace", "5"]
    with ServerProcess("divided", command) as running:
        yield running


def complete(server: ServerProcess, **changes: Any) -> str:
    body = {"prompt": "aabab", "max_tokens": 40, "temperature": 0, "ignore_eos": True, **changes}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def ranks(server: ServerProcess) -> list[psutil.Process]:
    """The processes that torchrun started, in the order of their ranks."""
    children = [child for child in psutil.Process(server.process.pid).children() if "serve" in child.cmdline()]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_replies_are_those_of_plain_decoding_and_it_ends_when_told(server: ServerProcess) -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"prompt": "babba"}]
    plain = [complete(server, speculation="off", **way) for way in ways]
    with ThreadPoolExecutor(3) as pool:
        drafted = pool.map(lambda way: complete(server, speculation={"drafter": "suffix"}, **way), ways * 3)
        assert list(drafted) == plain * 3
    assert len(set(plain)) == 3
    every = ranks(server)
    server.process.send_signal(signal.SIGTERM)
    assert not psutil.wait_procs(every, 60)[1]
    assert not re.search(r"\[rank\d\]|error: ", server.log()), "torchrun's own traceback aside"


def test_the_loss_of_one_process_ends_all(server: ServerProcess) -> None:
    assert complete(server)
    every = ranks(server)
    assert len(every) == 2
    every[1].kill()
    assert server.process.wait(60) != 0
    assert not psutil.wait_procs(every, 30)[1]
