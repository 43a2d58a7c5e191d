"""A training run of `--learn`: its training data, its held-out data, and the decision to use its head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.figures import ratio_of_sums
from paceline.bench.replay.prices import FreePrices
from paceline.bench.replay.run import Replayer
from paceline.checkpoints.head_files import holds_head, open_head
from paceline.checkpoints.head_fit import fit_to_target
from paceline.drafters.factory import open_drafter
from paceline.drafters.suffix import Suffix
from paceline.errors import HeadMismatch
from paceline.learn import training
from paceline.learn.folder import MIN_HELD_OUT, KeyFolder, describe_status, open_folder, open_key_folder
from paceline.learn.learner import Learner, LearningPlan
from paceline.learn.training import train_job, train_on_traffic
from paceline.llm import LLM
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.train.kinds import TrainJob
from paceline.train.recorded import RecordedDocuments, is_held
from paceline.types import DraftBudget
from tests.conftest import packaged_model
from tests.support.toys import toy_llm, toy_model

PROMPTS = [a + b for a in "abcdefghijkl" for b in "mnopqrstuvw"]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with recorded traffic."""
    folder = tmp_path_factory.mktemp("learn") / "l"
    llm, key_folder = toy_llm(layers=4), open_key_folder(open_folder(folder), None)
    with llm.record(key_folder.traffic):
        for prompt in PROMPTS:
            llm.generate(prompt, Sampling(max_new_tokens=5, ignore_eos=True))
    return key_folder.traffic


@pytest.fixture
def key_folder(traffic: Path, tmp_path: Path) -> KeyFolder:
    made = open_key_folder(open_folder(tmp_path / "l"), None)
    made.traffic.write_bytes(traffic.read_bytes())
    return made


def small(target: str = "toy") -> TrainJob:
    job = train_job(target, 37, 1 << 20)
    return replace(job, steps=2, ffn=16, plan=replace(job.plan, epochs=1, batch=16))


def gain(low: float) -> Any:
    return lambda llm, held, drafter, other: {"value": low + 0.1, "low": low, "high": low + 0.2}


def test_replies_to_one_prompt_are_on_one_side(traffic: Path) -> None:
    recording = Recording(traffic)
    documents = RecordedDocuments(recording, 2048)
    held = [reply.prompt for reply in recording if is_held(reply)]
    assert MIN_HELD_OUT <= len(held) == len(documents.held) < len(recording) / 3
    assert len(documents.train) + len(documents.held) == len(recording)
    assert {documents.held[i].prompt for i in range(len(held))} == {*held}
    assert not {documents.train[i].prompt for i in range(len(documents.train))} & {*held}
    assert RecordedDocuments(recording, 2048).digest == documents.digest


@pytest.mark.parametrize(("low", "used"), [(1.01, True), (1.0, False), (0.5, False)])
def test_a_head_is_used_only_if_its_interval_is_above_one(key_folder: KeyFolder, low: float, used: bool) -> None:
    llm = toy_llm(layers=4)
    status = train_on_traffic(llm, key_folder, "suffix:remember", small(), gain(low))
    assert status == key_folder.status()
    assert status["switched"] is used
    assert used is holds_head(key_folder.head)
    assert ("in use" if used else "not used") in describe_status(status)
    assert not key_folder.training_data.parent.exists(), "what is left over takes space"
    llm = LLM(toy_model(layers=4), {"suffix": Suffix()})
    with Learner(llm, [], LearningPlan(key_folder.path.parent)) as learner:
        assert learner._keys[0].new_tokens == 0
        policy = llm.engine.policies[learner.speculation(0).drafter]
        assert policy
        assert bool(policy.drafter.taps) is used


def test_few_held_out_replies_decide_nothing(key_folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MIN_HELD_OUT", 1000)
    status = train_on_traffic(toy_llm(layers=4), key_folder, "suffix:remember", small(), gain(9.0))
    assert (status["gain"], status["switched"]) == (None, False)
    assert "not compared" in describe_status(status)


def test_a_training_run_that_was_interrupted_goes_on_with_the_same_traffic(key_folder: KeyFolder) -> None:
    llm, seen = toy_llm(layers=4), list[Sequence[RecordedReply]]()

    def interrupt(llm: LLM, held: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
        seen.append(held)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_on_traffic(llm, key_folder, "suffix:remember", small(), interrupt)
    written = (key_folder.new_head / "config.json").stat().st_mtime_ns
    with llm.record(key_folder.traffic):
        llm.generate("new", Sampling(max_new_tokens=12, ignore_eos=True))

    def compare(llm: LLM, held: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
        assert (key_folder.new_head / "config.json").stat().st_mtime_ns == written, "it must not be trained again"
        seen.append(held)
        return {"value": 2.0, "low": 1.5, "high": 2.5}

    assert train_on_traffic(llm, key_folder, "suffix:remember", small(), compare)["replies"] == len(PROMPTS)
    assert seen[0] == seen[1]


def test_a_kill_while_the_traffic_is_copied_does_no_harm(key_folder: KeyFolder) -> None:
    lines = key_folder.traffic.read_bytes().splitlines(keepends=True)
    key_folder.training_data.parent.mkdir()
    key_folder.training_data.with_name(f"{key_folder.training_data.name}.new").write_bytes(b"".join(lines[:3]))
    assert train_on_traffic(toy_llm(layers=4), key_folder, "suffix:remember", small(), gain(9.0))["replies"] == len(
        PROMPTS
    )


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_kill_while_heads_are_switched_leaves_a_head(
    tmp_path: Path, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_folder = open_key_folder(open_folder(tmp_path / "l"), None)
    for name, path in {"head": key_folder.head, "candidate": key_folder.new_head}.items():
        path.mkdir(parents=True)
        (path / "config.json").write_text(name)
    left = [done]

    def killed(act: Any) -> Any:
        def step(path: Path, *rest: Any, **more: Any) -> Any:
            if path.exists():
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
            return act(path, *rest, **more)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed(Path.rename))
        patch.setattr(shutil, "rmtree", killed(shutil.rmtree))
        with nullcontext() if done == 3 else pytest.raises(KeyboardInterrupt):
            key_folder.use_new_head()
    open_key_folder(tmp_path / "l", None)  # as after a restart
    assert (key_folder.head / "config.json").read_text() == ("candidate" if done > 1 else "head")
    assert [path.name for path in key_folder.path.iterdir() if path.name.startswith("head")] == ["head"]


def test_a_training_run_finds_the_head_after_a_kill(key_folder: KeyFolder) -> None:
    llm = toy_llm(layers=4)
    train_on_traffic(llm, key_folder, "suffix:remember", small(), gain(9.0))
    key_folder.head.rename(key_folder.head.with_name("head.old"))

    def compare(llm: LLM, held: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
        assert holds_head(key_folder.head)
        return {"value": 0.9, "low": 0.8, "high": 1.0}

    assert not train_on_traffic(llm, key_folder, f"suffix:remember+head:{key_folder.head}", small(), compare)[
        "switched"
    ]
    assert holds_head(key_folder.head)


def test_a_head_of_another_model_is_no_start(key_folder: KeyFolder) -> None:
    train_on_traffic(toy_llm(layers=4), key_folder, "suffix:remember", small(), gain(9.0))
    config = key_folder.head / "config.json"
    settings = json.loads(config.read_text())
    settings["paceline"]["target_layers"] = 5
    config.write_text(json.dumps(settings))
    with pytest.raises(HeadMismatch):
        fit_to_target(open_head(key_folder.head), toy_model(layers=4))
    assert train_on_traffic(toy_llm(layers=4), key_folder, "suffix:remember", small(), gain(9.0))["switched"]


class Fixed(FreePrices):
    """Costs on a machine where a pass takes one second and drafting takes no time."""

    def round(self, rows: int, before: Sequence[int]) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.model
def test_a_head_trained_on_traffic_makes_new_prompts_faster(tmp_path: Path) -> None:
    """Train on a demo model's replies about animals and switch to the head, with fixed costs."""
    key_folder = open_key_folder(open_folder(tmp_path / "l"), None)
    animals = "cat dog horse cow pig hen duck goat fox wolf bear deer mouse rat frog owl bee ant fly crab"
    asks = ("Describe", "Write a story about", "Draw", "Praise")
    asked = [f"{ask} a {animal}." for animal in animals.split() for ask in asks]
    with packaged_model("demo") as model:
        llm = LLM(model)
        with llm.record(key_folder.traffic):
            llm.generate(asked, Sampling(max_new_tokens=32), width=16)

        def compare(llm: LLM, held: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
            replayer = Replayer(llm.model, Fixed(), timer=lambda: 0.0)
            drafters = [open_drafter(name, llm.model) for name in (drafter, other)]
            return ratio_of_sums(*(replayer.run(held, one, DraftBudget.chain(4)).reply_seconds for one in drafters))

        job = train_job("demo", model.target.vocab_size, 1 << 30)
        job = replace(job, vocabulary=4096, plan=replace(job.plan, epochs=1.25))
        status = train_on_traffic(llm, key_folder, "suffix:remember", job, compare)
        assert status["switched"], status
        served = LLM(model, {"suffix": Suffix()})
        with Learner(served, [], LearningPlan(key_folder.path.parent)) as learner:
            policy = served.engine.policies[learner.speculation(0).drafter]
            assert policy
            assert policy.drafter.taps, "the head is in use"
