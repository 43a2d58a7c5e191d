"""Two `paceline serve` processes behind nginx with deploy/nginx.conf."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

import paceline
from tests.support.running import Serving, serving
from tests.support.server_process import ServerProcess, free_port, paceline_serve
from tests.support.tiny_model import write_tiny

NGINX = shutil.which("nginx")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
CHAT = "/v1/chat/completions"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="needs nginx")]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, list[ServerProcess], Path]]:
    """Return nginx, the servers behind it, and their model."""
    folder = tmp_path_factory.mktemp("nginx")
    model, port = write_tiny(folder / "tiny"), free_port()
    with ExitStack() as running:
        command = paceline_serve(f"--model {model} --drafter suffix --quiet")
        servers = [running.enter_context(ServerProcess(f"server {i}", command)) for i in range(2)]
        text = CONFIG.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        text = re.sub(r"pid .*;", f"pid {folder}/nginx.pid;", text)
        for i, server in enumerate(servers):
            text = text.replace(f"127.0.0.1:800{i + 1}", f"127.0.0.1:{server.port}")
        (folder / "nginx.conf").write_text(text)
        # Run in the foreground, so that it ends with this test.
        nginx = subprocess.Popen(
            [str(NGINX), "-c", folder / "nginx.conf", "-p", folder, "-e", "stderr", "-g", "daemon off;"]
        )
        running.callback(nginx.wait, 20)
        running.callback(nginx.terminate)
        it = Serving(f"http://127.0.0.1:{port}")
        until = time.monotonic() + 20
        while not answers(it):
            assert time.monotonic() < until, "nginx does not answer"
            time.sleep(0.1)
        yield it, servers, model


def answers(it: Serving) -> bool:
    try:
        return it.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def asked(text: str, tokens: int = 20) -> dict[str, object]:
    said = [{"role": "user", "content": text * 100}]
    return {"messages": said, "max_tokens": tokens, "ignore_eos": True, "seed": 3, "temperature": 1.0}


def content(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_sessions_keep_their_server_and_a_server_that_stops_costs_no_request(
    behind: tuple[Serving, list[ServerProcess], Path],
) -> None:
    it, servers, model = behind
    sessions = [{"X-Session-Id": str(i)} for i in range(8)]
    with serving(paceline.load(str(model), drafter="suffix"), model=model.name) as one:
        expected = [content(one.post(CHAT, asked(str(i)))) for i in range(8)]
    for turn in range(2):
        for i, session in enumerate(sessions):
            answer = it.post(CHAT, asked(str(i)), headers=session)
            assert content(answer) == expected[i]
            assert (answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50) == (turn > 0)
    # A stream arrives in parts, not all at the end.
    with httpx.stream("POST", it.address + CHAT, json=asked("a", 2000) | {"stream": True}, timeout=60) as answer:
        parts = [time.monotonic() for _ in answer.iter_lines()]
    assert parts[10] - parts[0] < (parts[-1] - parts[0]) / 2
    servers[0].stop()
    for i, session in enumerate(sessions):
        assert content(it.post(CHAT, asked(str(i)), headers=session)) == expected[i]
