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
import torch
from safetensors.torch import save_file

from tests.support.gguf_writing import FFN, HIDDEN, Q, write_gguf
from tests.support.server_process import ServerProcess, free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PACELINE_CONFIG", "")
    write_gguf(tmp_path / "tiny.gguf", kind=Q.Q8_0)
    write_lora(tmp_path / "lora")
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
    command += ["--adapter", f"lora={tmp_path / 'lora'}"]
    with ServerProcess("divided", command) as running:
        yield running


def write_lora(folder: Path) -> None:
    """Write a LoRA adapter for the tiny model in PEFT's layout."""
    sizes = {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, FFN), "mlp.down_proj": (FFN, HIDDEN)}
    noise, tensors = torch.Generator().manual_seed(0), {}
    for module, (width, out) in sizes.items():
        name = f"base_model.model.model.layers.0.{module}.lora_"
        tensors[name + "A.weight"] = torch.randn(4, width, generator=noise)
        tensors[name + "B.weight"] = torch.randn(out, 4, generator=noise)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [*sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


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
    """Return the processes that torchrun started, in the order of their ranks."""
    children = [child for child in psutil.Process(server.process.pid).children() if "serve" in child.cmdline()]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_replies_equal_plain_decoding_and_the_server_ends_on_request(server: ServerProcess) -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"prompt": "babba"}, {"model": "lora"}]
    plain = [complete(server, speculation="off", **way) for way in ways]
    with ThreadPoolExecutor(4) as pool:
        drafted = pool.map(lambda way: complete(server, speculation={"drafter": "suffix"}, **way), ways * 3)
        assert list(drafted) == plain * 3
    assert len(set(plain)) == 4
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
