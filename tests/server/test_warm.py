"""`paceline serve --warm`: prompts that the server reads before it starts."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import InvalidOption
from paceline.llm import LLM
from paceline.server.limits import Settings
from paceline.server.warm import read_prompt, warm_prompt
from paceline.server.worker import Worker, WorkerLimits
from tests.support.running import serving
from tests.support.toys import toy_llm

SYSTEM = "you are a helper. " * 12
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hello, who are you?"}
LIMITS = WorkerLimits(slots=2, prefix_bytes=1 << 26)


def seamless_llm() -> LLM:
    """Return a toy that computes in float64, so that rounding does not matter."""
    llm = toy_llm(context_length=2048)
    llm.engine.__dict__["chunk_invariant"] = True
    return llm


def cached_after(warm: Path, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Read a file, serve, and send a request. Return the number of tokens read, and the request's prefix hit."""
    llm = seamless_llm()
    count, known = read_prompt(Worker(llm, LIMITS), Settings(), warm_prompt(warm))
    assert known == 0
    with serving(llm) as it:
        assert it.post(path, body).is_success
        found = it.get("/metrics").text.partition('vllm:prefix_cache_hits_total{model_name="toy"} ')[2].splitlines()[0]
    return count, int(float(found))


def test_the_limit_of_a_worker_replaces_the_prefix_cache_of_its_model() -> None:
    llm = seamless_llm()
    llm.engine.remember(1 << 20)
    kept = llm.engine.prefixes
    Worker(llm, WorkerLimits(slots=2))
    assert llm.engine.prefixes is kept
    Worker(llm, WorkerLimits(slots=2, prefix_bytes=0))
    assert llm.engine.prefixes is None


def test_a_system_prompt_is_read_up_to_the_text_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM)
    body = {"messages": [{"role": "system", "content": SYSTEM}, USER], "max_tokens": 2}
    count, found = cached_after(tmp_path / "system.txt", "/v1/chat/completions", body)
    assert count == len(f"<system:{SYSTEM}><user:")
    assert found == count - 1, "the last token of a prompt is fed in the first round"


def test_a_request_is_read_with_its_tools(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": SYSTEM}, USER]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages, "tools": [TOOL]}))
    more = [*messages, {"role": "assistant", "content": "a helper."}, USER]
    body = {"messages": more, "tools": [TOOL], "max_tokens": 2}
    count, found = cached_after(tmp_path / "chat.json", "/v1/chat/completions", body)
    assert found >= count - 4


def test_a_request_in_the_shape_of_anthropic_is_read(tmp_path: Path) -> None:
    body = {"model": "toy", "system": SYSTEM, "messages": [USER], "max_tokens": 2}
    (tmp_path / "messages.json").write_text(json.dumps(body))
    count, found = cached_after(tmp_path / "messages.json", "/v1/messages", body)
    assert found == count - 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.txt", None),
        ("binary.txt", b"\xff\xfe\x00"),
        ("broken.json", b'{"messages": ['),
        ("number.json", b"7"),
        ("empty.json", b"[]"),
        ("unknown.json", b'[{"role": "cook", "content": "x"}]'),
    ],
)
def test_other_files_are_refused_before_a_model_is_read(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    done = CliRunner().invoke(app, ["serve", "/no/model", "--port", "0", "--warm", str(path)])
    assert done.exit_code == 1
    assert "error: --warm cannot read" in done.stderr


def test_a_prompt_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM * 20)
    with pytest.raises(InvalidOption, match=r"cannot use .*system\.txt"):
        read_prompt(Worker(seamless_llm(), LIMITS), Settings(), warm_prompt(tmp_path / "system.txt"))


def test_the_command_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM)
    monkeypatch.setattr(import_module("paceline.cli.serve").LoadFlags, "load", lambda *_, **__: seamless_llm())
    monkeypatch.setattr("paceline.server.listen.run", lambda *_: None)
    file = str(tmp_path / "system.txt")
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--warm", file, "--warm", file])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert f"read {file}: 231 tokens, 0 of them cached" in said
    assert f"read {file}: 231 tokens, 229 of them cached" in said
