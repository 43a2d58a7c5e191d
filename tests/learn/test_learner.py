"""A server that learns from its traffic: separately for each API key, within limits, with any folder contents."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption
from paceline.files.jsonl import older_file
from paceline.learn import learner as learner_module
from paceline.learn.folder import MIN_HELD_OUT, delete_folder, key_folders, open_folder, open_key_folder
from paceline.learn.learner import Learner, LearningPlan
from paceline.llm import LLM, load
from paceline.recording.file import Recording
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.running import Serving, serving
from tests.support.tiny_model import write_tiny
from tests.support.toys import toy_model

MODEL = toy_model(layers=2)
BODY = {"prompt": "hello", "max_tokens": 24, "temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": False}

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
"""Sampling parameters for all replies."""


def fresh_llm() -> LLM:
    return LLM(MODEL, {"suffix": Suffix()}, DraftBudget.chain(5))


def plan(folder: Path, **changes: Any) -> LearningPlan:
    return LearningPlan(folder, **{"idle": 1e9} | changes)


def ask(it: Serving, key: str | None = None, **changes: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = it.post("/v1/completions", BODY | changes, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def rounds(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["speculation"]["rounds"]
    return count


def test_a_key_drafts_from_its_own_replies_only(tmp_path: Path) -> None:
    llm = fresh_llm()
    with serving(llm, learner=Learner(llm, ["a", "b"], plan(tmp_path / "l")), api_keys=("a", "b")) as it:
        first, second, other = ask(it, "a"), ask(it, "a"), ask(it, "b")
    texts = [answer["choices"][0]["text"] for answer in (first, second, other)]
    assert texts == [LLM(MODEL).generate("hello", SAMPLING, raw=True).text] * 3
    assert rounds(second) < rounds(first)
    assert rounds(other) == rounds(first), "a reply to another key must not make this one faster"


def test_the_memory_outlives_the_server(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        llm = fresh_llm()
        with serving(llm, learner=Learner(llm, [], plan(tmp_path / "l"))) as it:
            found.append(rounds(ask(it)))
    assert found[1] < found[0]


def test_clients_can_neither_name_nor_list_a_private_drafter(tmp_path: Path) -> None:
    llm = fresh_llm()
    learner = Learner(llm, ["a", "b"], plan(tmp_path / "l"))
    with serving(llm, learner=learner, api_keys=("a", "b")) as it:
        answer = ask(it, "a")
        shown = answer["usage"]["speculation"]["drafter"]
        for name in (shown, "learned-1-0"):
            body = BODY | {"speculation": {"drafter": name}}
            refused = it.post("/v1/completions", body, headers={"Authorization": "Bearer b"})
            assert refused.status_code == 400
            assert "Loaded drafters: suffix" in refused.text.replace("\\", "")
            assert "learned" not in refused.text.replace(name, "")
        listed = it.get("/v1/models", headers={"Authorization": "Bearer b"}).text
        assert "learned" not in listed
        assert learner.speculation(0).drafter not in listed


def test_traffic_stays_within_its_bound_and_is_private(tmp_path: Path) -> None:
    limit, llm = 3000, fresh_llm()
    recorder = learner_module.ReplyRecorder(tmp_path / "r.jsonl", MODEL, limit)
    llm.recorder = recorder
    sizes = []
    for seed in range(30):
        llm.generate("hello", max_new_tokens=24, temperature=1.0, seed=seed)
        files = [path for path in (recorder.path, older_file(recorder.path)) if path.exists()]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
        sizes.append(sum(path.stat().st_size for path in files))
    assert limit // 2 < max(sizes) <= limit
    kept = [reply.sampling.seed for path in (older_file(recorder.path), recorder.path) for reply in Recording(path)]
    assert kept == [*range(30)][-len(kept) :], "the oldest must go first"


@pytest.mark.parametrize("damage", [b"", b"\0" * 99, b"some text\n", b'{"paceline_recording": 1}\n', b"[1, 2"])
def test_a_damaged_file_does_not_stop_a_server(tmp_path: Path, damage: bytes) -> None:
    key_folder = open_key_folder(open_folder(tmp_path / "l"), None)
    key_folder.head.mkdir()
    key_folder.training_data.parent.mkdir()
    names = ("traffic.jsonl", "traffic.jsonl.old", "status.json", "lesson/traffic.jsonl", "head/config.json")
    for name in names:
        (key_folder.path / name).write_bytes(damage)
    key_folder.new_head.write_bytes(damage)
    llm = fresh_llm()
    with serving(llm, learner=Learner(llm, [], plan(tmp_path / "l"))) as it:
        assert ask(it)["choices"][0]["text"]
    assert len(key_folder.replies()) == 1


def test_traffic_of_another_model_is_dropped(tmp_path: Path) -> None:
    other = LLM(toy_model(layers=3), {"suffix": Suffix()})
    for llm in (other, fresh_llm()):
        with serving(llm, learner=Learner(llm, [], plan(tmp_path / "l"))) as it:
            ask(it)
    assert len(open_key_folder(tmp_path / "l", None).replies()) == 1


def test_the_folder_is_forgotten_only_if_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    for refused in (delete_folder, key_folders, open_folder):
        with pytest.raises(InvalidOption, match="--learn"):
            refused(tmp_path / "other")
    folder = tmp_path / "l"
    with Learner(fresh_llm(), ["secret-key"], plan(folder)):
        assert "secret" not in "".join(path.name for path in folder.rglob("*"))
        assert all(path.stat().st_mode & 0o77 == 0 for path in folder.rglob("*") if path.name != ".lock")
        with pytest.raises(InvalidOption, match="another process is using"):
            delete_folder(folder)
        with pytest.raises(InvalidOption, match="another process is using"):
            Learner(fresh_llm(), [], plan(folder))
    delete_folder(folder)
    assert not folder.exists()


SLEEPS = (sys.executable, "-c", "import sys; sys.stdin.read()")
FAILS = (sys.executable, "-c", "raise SystemExit(1)")


def soon(reached: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until and not reached():
        time.sleep(0.01)
    return reached()


def test_a_training_run_stops_at_the_first_request_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "TRAIN_COMMAND", SLEEPS)
    llm = fresh_llm()
    learner = Learner(llm, [], plan(tmp_path / "l", idle=0.01, min_traffic_tokens=20))
    with serving(llm, learner=learner) as it:
        time.sleep(0.1)
        assert learner._child is None, "there is nothing to learn from yet"
        ask(it)
        assert soon(lambda: learner._child is not None)
        child = learner._child
        ask(it, max_tokens=1)
        assert child
        assert soon(lambda: child.poll() is not None)
        assert soon(lambda: learner._child not in (None, child))
        child = learner._child
    assert child
    assert child.poll() is not None, "the server must not leave it behind"


def test_a_training_run_that_fails_is_not_repeated_for_the_same_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner_module, "TRAIN_COMMAND", FAILS)
    llm = fresh_llm()
    with serving(llm, learner=Learner(llm, [], plan(tmp_path / "l", idle=0.01, min_traffic_tokens=20))) as it:
        ask(it)
        assert soon(lambda: "a training run failed with exit code 1" in caplog.text)
        time.sleep(0.3)
        assert caplog.text.count("a training run failed") == 1
        ask(it)
        assert soon(lambda: caplog.text.count("a training run failed") == 2)


def test_no_training_run_begins_without_memory_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = fresh_llm()
    poor = plan(tmp_path / "l", idle=0.01, min_traffic_tokens=20, free_memory=lambda: 0)
    with serving(llm, learner=Learner(llm, [], poor)) as it:
        ask(it)
        assert soon(lambda: "not enough memory to load the model again" in caplog.text)


def test_status_is_json(tmp_path: Path) -> None:
    key_folder = open_key_folder(open_folder(tmp_path / "l"), None)
    key_folder.write_status({"switched": True})
    assert json.loads((key_folder.path / "status.json").read_text()) == key_folder.status() == {"switched": True}


@pytest.mark.slow
def test_an_idle_server_trains_on_its_traffic(tmp_path: Path) -> None:
    source = load(write_tiny(tmp_path / "model"), drafter=None, dtype="float32").model
    llm = LLM(source, {"suffix": Suffix()})
    how = plan(tmp_path / "l", idle=1.0, min_traffic_tokens=1000, load={"dtype": "float32"})
    learner = Learner(llm, [], how)
    key_folder = key_folders(how.folder)[0]
    with serving(llm, learner=learner) as it:
        for number in range(120):
            ask(it, prompt=f"{number} and {number * 7}", max_tokens=12)
        until = time.monotonic() + 1200  # a training run yields to all other work of the machine
        while time.monotonic() < until and not key_folder.status():
            time.sleep(0.5)
        status = key_folder.status()
        assert status["replies"] <= 120
        assert status["held"] >= MIN_HELD_OUT
        assert status["gain"].keys() == {"value", "low", "high"}
        assert status["switched"] is (status["gain"]["low"] > 1.0)
        assert soon(lambda: learner._child is None)
        assert ask(it)["choices"][0]["text"] == LLM(source).generate("hello", SAMPLING, raw=True).text
