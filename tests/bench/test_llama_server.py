"""Arguments and requests to llama.cpp's server, with a stand-in program that gives the same answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import llama_server as module
from paceline.bench.llama_server import llama_server
from paceline.bench.peers import PeerPrompt, PeerSetup, PeerUnavailable, peer_drafters
from paceline.bench.systems import Comparison

PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

log = open({log!r}, "a")
print(json.dumps(sys.argv[1:]), file=log, flush=True)
if "bad.gguf" in sys.argv:
    sys.exit("error: cannot load bad.gguf")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send(b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(json.dumps([self.path, body]), file=log, flush=True)
        if self.path == "/tokenize":
            return self.send(json.dumps(dict(tokens=list(body["content"].encode()))).encode())
        events = [dict(tokens=[7]), dict(tokens=[8, 9]), dict(tokens=[36]), dict(tokens=[], stop_type="eos")]
        self.send(b"".join(b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events))

    def send(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(PROGRAM.format(python=sys.executable, log=str(tmp_path / "log")))
    program.chmod(0o755)
    found = {"llama-server": str(program)}
    monkeypatch.setattr(module.shutil, "which", lambda name: found.get(name))
    started: list[Any] = []
    start = module.subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    yield tmp_path / "log"
    for process in started:
        process.kill()
        process.wait()


def lines(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_each_kind_of_speculation_is_a_server_of_its_own(log: Path) -> None:
    answer = llama_server(PeerSetup("model.gguf", (36,), 8, 40, 2, draft="draft.gguf"))
    replies = [answer(PeerPrompt("hé", 0.7, drafter, 3)) for drafter in ("", "ngram-mod", "draft", "draft")]
    assert [reply.token_ids for reply in replies] == [[7, 8, 9, 36]] * 4
    assert all(reply.first > 0 for reply in replies)
    told = lines(log)
    commands = [" ".join(line) for line in told if line[0].startswith("-")]
    assert ["--spec-type" in command for command in commands] == [False, True, True]
    assert all("-m model.gguf -t 2 -tb 2" in command and "-np 1" in command for command in commands)
    assert "ngram-mod" in commands[1]
    assert "draft-simple -md draft.gguf" in commands[2]
    completions = [body for path, body in (line for line in told if line[0] == "/completion")]
    assert {tuple(body["prompt"]) for body in completions} == {tuple("hé".encode())}
    assert {(body["temperature"], body["seed"], body["n_predict"]) for body in completions} == {(0.7, 3, 8)}
    assert not any(body["cache_prompt"] for body in completions)


def test_a_reply_is_no_longer_than_asked(log: Path) -> None:
    assert llama_server(PeerSetup("model.gguf", (36,), 2, 40, 2))(PeerPrompt("a")).token_ids == [7, 8]


def test_a_server_that_cannot_start_says_why(log: Path) -> None:
    with pytest.raises(PeerUnavailable, match=r"cannot load bad\.gguf"):
        llama_server(PeerSetup("bad.gguf", (36,), 8, 40, 2))


def test_a_missing_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(PeerUnavailable, match="llama-server is not on PATH"):
        llama_server(PeerSetup("model.gguf", (36,), 8, 40, 2))


def test_llama_server_gets_the_same_draft_model() -> None:
    comparison = Comparison(("suffix", "model:small.gguf@8", "model:other.gguf"))
    assert comparison.draft_model == "small.gguf"
    assert peer_drafters("llama-server", comparison.draft_model) == ("ngram-mod", "ngram-simple", "draft")
    assert peer_drafters("llama-server", Comparison(("suffix", "model:folder")).draft_model)[-1] == "ngram-simple"
    assert peer_drafters("openvino", "small.gguf") == ("lookup",)
