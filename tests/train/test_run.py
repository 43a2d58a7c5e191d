import json
import multiprocessing
import os
import signal
from dataclasses import field, make_dataclass, replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.head_files import open_head
from paceline.drafters.factory import make_drafter
from paceline.errors import CannotWrite, InvalidOption, ModelNotFound
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, MedusaConfig
from paceline.models.lazy import Quantised
from paceline.sampling.parameters import Sampling
from paceline.testing.tiny import TINY, random_tensors
from paceline.train import answers, loop, run
from paceline.train.kinds import TrainJob
from paceline.train.run import Listener, _stated, train
from tests.support.cover import some
from tests.support.toys import loaded, toy_llm

KINDS = {"eagle3": EagleConfig, "medusa": MedusaConfig, "early-exit": ExitConfig, "block": BlockConfig}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return toy_llm(layers=4)


@pytest.fixture
def order(tmp_path: Path) -> TrainJob:
    prompts = tmp_path / "prompts.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts.write_text("".join(json.dumps({"prompt": letters[i % 26] * (1 + i // 26)}) + "\n" for i in range(100)))
    plan = loop.TrainPlan(epochs=1, batch=8, rate=5e-3, every=0.0, evaluate=1e9)
    mix = answers.AnswerPlan((0.0, 0.8), answer_tokens=8)
    return TrainJob("toy", "eagle3", tmp_path / "head", prompts, vocabulary=30, steps=2, rank=8, mix=mix, plan=plan)


def text(llm: LLM, drafter: str | None) -> list[int]:
    made = make_drafter(drafter, llm.model, lambda reference: llm.model)
    return LLM(llm.model, made).generate("abab", Sampling(max_new_tokens=20)).token_ids


@some("kind", KINDS.keys(), fast=["eagle3"])
def test_one_call_makes_a_drafter_that_drafts(kind: str, llm: LLM, order: TrainJob) -> None:
    stages: list[str] = []
    report = train(llm, replace(order, kind=kind), Listener(stage=stages.append))
    assert stages == ["the target answers", "counting tokens", "hidden states", f"training {kind}"]
    assert report.documents == report.total > 100
    head = open_head(order.out)
    assert isinstance(head.config, KINDS[kind])
    assert head.target == "toy"
    assert head.target_layers == 4
    assert len({file.stat().st_mode for file in order.out.iterdir()}) == 1
    assert head.extra["held_out"]["tokens_per_round"] == report.acceptance
    card = (order.out / "README.md").read_text()
    assert f"{kind} drafter for toy" in card
    assert "Seed 0" in card
    assert text(llm, f"head:{order.out}") == text(llm, None)
    assert not list(order.work.glob("states-*"))
    assert (order.work / "answers.jsonl").exists()


def kill(at: TrainJob, stage: str) -> None:
    """Run in a separate process, and kill it like `kill -9` while it writes answers or trains."""

    def writing(progress: object) -> None:
        if stage == "writing" and (at.work / "answers.jsonl").stat().st_size > 2000:
            os.kill(os.getpid(), signal.SIGKILL)

    def training(report: loop.Report) -> None:
        if stage == "training" and report.documents > 60:
            os.kill(os.getpid(), signal.SIGKILL)

    train(toy_llm(layers=4), at, Listener(writing=writing, training=training))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(llm: LLM, order: TrainJob, tmp_path: Path) -> None:
    train(llm, order)
    whole = dict(open_head(order.out).tensors)
    again = replace(order, out=tmp_path / "again")
    for stage in ("writing", "training"):
        process = multiprocessing.get_context("spawn").Process(target=kill, args=(again, stage))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert not again.out.exists()
    seen: list[int] = []
    train(llm, again, Listener(training=lambda report: seen.append(report.documents)))
    assert seen[0] > 60, "the training was begun anew"
    resumed = open_head(again.out).tensors
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_a_target_in_codes_of_its_own_is_trained_for(order: TrainJob) -> None:
    config = replace(TINY, layers=4)
    target = Decoder(config, Quantised(random_tensors(config, 0), "int8"), torch.float32, torch.device("cpu"))
    coded = LLM(loaded(target))
    report = train(coded, replace(order, bits=4, plan=replace(order.plan, epochs=0.2)))
    assert report.tokens > 100
    assert text(coded, f"head:{order.out}") == text(coded, None)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_loses_no_training(
    llm: LLM, order: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("paceline.checkpoints.head_write.save_file", full)
        with pytest.raises(CannotWrite, match="No space left"):
            train(llm, order)
    steps: list[loop.Report] = []
    train(llm, order, Listener(training=steps.append))
    assert not steps
    assert open_head(order.out)


@pytest.mark.slow
def test_without_prompts_the_target_makes_its_own(llm: LLM, order: TrainJob) -> None:
    stages: list[str] = []
    plan = replace(order.plan, epochs=0.2)
    train(llm, replace(order, prompts=None, own_prompts=60, plan=plan), Listener(stage=stages.append))
    assert stages[:2] == ["the target writes prompts", "the target answers"]
    assert len((order.work / "prompts.jsonl").read_text().splitlines()) == 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_from_a_trained_drafter(kind: str, llm: LLM, order: TrainJob, tmp_path: Path) -> None:
    order = replace(order, kind=kind)
    train(llm, order)
    still = replace(order.plan, rate=1e-9, epochs=0.1)
    train(llm, replace(order, out=tmp_path / "next", start=order.out, plan=still))
    first, second = open_head(order.out).tensors, open_head(tmp_path / "next").tensors
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-2, atol=1e-4)
    other = "medusa" if kind != "medusa" else "eagle3"
    with pytest.raises(InvalidOption, match="a drafter of another kind"):
        train(llm, replace(order, kind=other, out=tmp_path / "other", start=order.out))


def test_invalid_starting_points_are_refused_before_anything_is_answered(llm: LLM, order: TrainJob) -> None:
    with pytest.raises(ModelNotFound):
        train(llm, replace(order, start=order.out.with_name("nowhere")))
    assert not order.work.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("eagle3", "lm_head.weight"), ("block", "markov_head.markov_w2.weight")])
def test_a_drafter_keeps_the_rows_of_tokens_that_it_knew(
    kind: str, name: str, llm: LLM, order: TrainJob, tmp_path: Path
) -> None:
    order = replace(order, kind=kind)
    train(llm, replace(order, vocabulary=20))
    still = replace(order.plan, rate=1e-9, epochs=0.1)
    train(llm, replace(order, vocabulary=30, out=tmp_path / "next", start=order.out, plan=still))
    new = llm.model.target.head() if kind == "eagle3" else torch.zeros(llm.model.target.vocab_size, order.rank or 0)
    first, second = open_head(order.out).tensors, open_head(tmp_path / "next").tensors
    known, ids = (list(torch.arange(len(t["d2t"])) + t["d2t"]) for t in (first, second))
    assert first[name].any()
    for token, row in zip(ids, second[name], strict=True):
        origin = first[name][known.index(token)] if token in known else new[token]
        torch.testing.assert_close(row.float(), origin.float(), rtol=1e-2, atol=1e-3)
    with pytest.raises(InvalidOption, match=r"it has a .* instead of a"):
        train(llm, replace(order, ffn=24, out=tmp_path / "wide", start=order.out))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "eagle9"}, "no drafter of kind 'eagle9'"),
        ({"prompts": None, "answers": Path("a")}, "--answers needs --prompts"),
        ({"plan": loop.TrainPlan(epochs=0)}, "epochs must be > 0"),
        ({"plan": loop.TrainPlan(rate=2.0)}, "got 1 and 2"),
        ({"vocabulary": 99}, "draft vocabulary .* got 99"),
        ({"kind": "block", "steps": 1}, "at least 2 tokens, got --steps 1"),
    ],
)
def test_a_bad_order_is_refused(changes: dict[str, object], said: str, llm: LLM, order: TrainJob) -> None:
    with pytest.raises(InvalidOption, match=said):
        train(llm, replace(order, **changes))
    assert not order.out.exists()


def test_a_bad_order_is_refused_before_anything_is_loaded(order: TrainJob) -> None:
    with pytest.raises(InvalidOption):
        run.check(replace(order, kind="nothing"))


def test_a_field_that_an_update_adds_refuses_no_checkpoint() -> None:
    old = make_dataclass("Config", [("width", int), ("scale", float, field(default=1.0))])
    new = make_dataclass("Config", [("width", int), ("scale", float, field(default=1.0)), ("bias", bool, False)])
    assert _stated((old(3), 1)) == _stated((new(3), 1)) == "(Config(width=3), 1)"
    assert len({_stated(x) for x in (new(3), new(4), new(3, 0.5), new(3, 1.0, True))}) == 4
