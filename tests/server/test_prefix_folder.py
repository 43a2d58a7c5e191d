"""`paceline serve --prefix-dir`: prefixes survive a restart of the server."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.engine.draft_policy import Speculation
from paceline.llm import LLM, load
from paceline.sampling.parameters import Sampling
from paceline.server.models import Models, ModelSource
from paceline.server.worker import ReplyJob, ReplyRound, Worker, WorkerLimits
from tests.support.running import Serving, serving
from tests.support.toys import toy_llm

BODY = {"messages": [{"role": "user", "content": "abc, def. " * 30}], "max_tokens": 8}
LIMITS = WorkerLimits(slots=2, prefill_quota=8, prefix_bytes=1 << 26)


def restarted(folder: Path) -> LLM:
    """Return a model with a prefix folder, as after a start. It uses float64, so that rounding does not matter."""
    llm = toy_llm(context_length=2048)
    llm.engine.__dict__["chunk_invariant"] = True
    llm.engine.remember(1 << 26, folder, 1 << 30)
    return llm


def answered(it: Serving) -> tuple[str, int, dict[str, float]]:
    """Return the reply, the cached tokens, and the metrics of prefixes."""
    reply = it.post("/v1/chat/completions", BODY).json()
    lines = [line.split() for line in it.get("/metrics").text.splitlines() if "prefix" in line and line[0] != "#"]
    found = {name.partition("{")[0]: float(value) for name, value in lines if "_created" not in name}
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"], found


def test_a_restarted_server_does_not_read_a_prompt_again(tmp_path: Path) -> None:
    with serving(restarted(tmp_path), LIMITS) as it:
        text, cached, metrics = answered(it)
    assert cached == metrics["paceline:prefix_disk_hits_total"] == metrics["paceline:prefix_disk_bytes"] == 0
    (file,) = tmp_path.iterdir()
    with serving(restarted(tmp_path), LIMITS) as it:
        again, cached, metrics = answered(it)
    assert again == text
    assert cached > 300
    assert metrics["paceline:prefix_disk_hits_total"] == metrics["vllm:prefix_cache_hits_total"] == cached
    assert metrics["paceline:prefix_disk_bytes"] == file.stat().st_size


def test_a_text_in_use_is_kept_when_the_server_stops(tmp_path: Path) -> None:
    llm = restarted(tmp_path)
    worker, prompt = Worker(llm, LIMITS), llm.prompt_ids("abc, def. " * 30)

    async def work() -> None:
        worker.start()
        rounds: asyncio.Queue[ReplyRound] = asyncio.Queue()
        worker.submit(ReplyJob(prompt, Sampling(max_new_tokens=1500, ignore_eos=True)), rounds)
        await asyncio.wait_for(rounds.get(), 60)
        await worker.stop(0.0)

    asyncio.run(work())
    again = restarted(tmp_path).engine.prefixes
    assert again is not None
    assert again.estimate_hit([*prompt, 1]) >= len(prompt) - 1


@pytest.mark.parametrize("shown", [False, True])
def test_the_log_says_why_a_prompt_was_read_again(
    shown: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.server")
    rest = "abc, def. " * 40
    with serving(restarted(tmp_path), LIMITS, log_prompts=shown) as it:
        for day in ("monday", "tuesday", "tuesday"):
            message = {"role": "user", "content": f"it is {day} today. {rest}"}
            it.post("/v1/chat/completions", {"messages": [message], "max_tokens": 4})
    lines = [record.getMessage() for record in caplog.records if "diverged" in record.getMessage()]
    assert len(lines) == 1
    assert "diverged at token 12 of 4" in lines[0]
    assert ("'tuesday today. a' instead of 'monday today. ab'" in lines[0]) == shown


def test_the_start_says_what_the_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = restarted(tmp_path)
    llm.generate("abc, def. " * 30, max_new_tokens=4)
    llm.engine.save_prefixes(60)
    worker = Worker(restarted(tmp_path), LIMITS, Speculation(None))
    models = Models([ModelSource(("toy",), lambda: worker, stays=True)])
    import_module("paceline.cli.serve")._announce(models, True, False, "http://127.0.0.1:8000")
    assert f"prefixes: 1 in {tmp_path}, which holds" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--prefix-disk", "much"], "--prefix-disk must be a size in GiB"),
        (["--prefix-disk", "0"], "--prefix-disk must be a size in GiB"),
        (["--prefix-memory", "0"], "--prefix-dir needs a prefix cache in memory"),
    ],
)
def test_options_are_checked_before_a_model_is_read(options: list[str], error: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "/no/model", "--port", "0", "--prefix-dir", str(tmp_path), *options])
    assert done.exit_code == 1
    assert error in " ".join(done.stderr.split())


@pytest.mark.parametrize(("given", "size"), [("8G", 8.0), ("2", 2.0), ("512M", 0.5), ("1.5 GiB", 1.5), ("1T", 1024.0)])
def test_the_model_is_loaded_with_the_folder(
    given: str, size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def opened(_: object, **options: Any) -> LLM:
        asked.update(options)
        return toy_llm()

    monkeypatch.setattr(import_module("paceline.cli.serve").LoadFlags, "load", opened)
    monkeypatch.setattr("paceline.server.listen.run", lambda *_: None)
    done = CliRunner().invoke(
        app, ["serve", "--quiet", "--port", "0", "--prefix-dir", str(tmp_path), "--prefix-disk", given]
    )
    assert done.exit_code == 0, done.output
    assert (asked["prefix_dir"], asked["prefix_disk"]) == (tmp_path, size)


@pytest.mark.slow
def test_a_loaded_model_keeps_its_prefixes(tmp_path: Path) -> None:
    text = "The prefix cache outlives the process. " * 12
    llm = load(prefix_dir=tmp_path / "prefixes", prefix_disk=0.5, progress=False)
    reply = llm.generate(text, max_new_tokens=8)
    del llm
    again = load(prefix_dir=tmp_path / "prefixes", progress=False).generate(text, max_new_tokens=8)
    assert again.text == reply.text
    assert again.stats.from_disk > 0
