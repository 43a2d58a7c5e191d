"""`paceline train` from the user's view."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline.llm
from paceline.checkpoints.head_files import open_head
from paceline.cli.train import _TimeLeft
from paceline.train.prompts import Prompts, is_held
from tests.support.toy_cli import failure, run
from tests.support.toys import toy_llm


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    llm = toy_llm(layers=4)
    monkeypatch.setattr(paceline.llm, "load", lambda *_, **__: llm)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "abcdefgh"[i % 8] * (1 + i // 8)}) + "\n" for i in range(64)))
    return path


def train(prompts: Path, *more: str):
    small = ["--answer-tokens", "8", "--batch", "8", "--steps", "2", "--vocabulary", "30"]
    return run("train", "--prompts", str(prompts), "--out", str(prompts.parent / "head"), *small, *more)


def test_one_command_makes_a_drafter_and_says_how_good_it_is(prompts: Path) -> None:
    result = train(prompts)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("the target answers: 1 of 128") or lines[0].startswith("the target answers: 0 of 128")
    assert "tokens per round on held-out answers (greedy, chain of 2)" in lines[-1]
    assert not any("min left" in line for line in lines), "nothing is known of the time yet"
    assert open_head(prompts.parent / "head").config.taps == (2, 2, 1)
    card = (prompts.parent / "head" / "README.md").read_text()
    assert card.startswith("# eagle3 drafter for demo")


def test_the_time_left_follows_from_what_was_done_since_the_first_report() -> None:
    left = _TimeLeft()
    assert left.after(100, 400, 7.0) == ""
    assert left.after(150, 400, 67.0) == "5 min left, "


@pytest.mark.slow
def test_a_head_is_stored_in_four_bits(prompts: Path) -> None:
    result = train(prompts, "--bits", "4")
    assert result.exit_code == 0, result.output
    file = prompts.parent / "head/model.safetensors"
    assert load_file(file)["fc.weight"].dtype == torch.uint8
    assert open_head(prompts.parent / "head").tensors["fc.weight"].dtype == torch.float32
    told = json.loads(run("info", str(file.parent), "--json").stdout)
    assert next(iter(told["dtypes"])) == "Q4_1"
    assert told["bytes"] == file.stat().st_size
    assert "--bits must be 4 or 16, got 8" in failure(train(prompts, "--bits", "8"))


@pytest.mark.slow
def test_layers_and_lengths_can_be_chosen(prompts: Path) -> None:
    result = train(prompts, "--taps", "0, 3,1", "--max-length", "16")
    assert result.exit_code == 0, result.output
    assert open_head(prompts.parent / "head").config.taps == (0, 3, 1)


@pytest.mark.slow
def test_quiet_says_nothing(prompts: Path) -> None:
    result = train(prompts, "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kind", "eagle9"], "no drafter of kind 'eagle9' can be trained. Choose eagle3, medusa"),
        (["--temperatures", "hot"], "--temperatures must be numbers separated by commas, got 'hot'"),
        (["--vocabulary", "99"], "the draft vocabulary must have 1 to 37 tokens, got 99"),
        (["--epochs", "0"], "epochs must be > 0 and the rate between 0 and 1, got 0"),
        (["--taps", "early,late"], "--taps must be whole numbers separated by commas, got 'early,late'"),
        (["--taps", "1,4"], "taps must be layers from 0 to 3 of this target, got 4"),
    ],
)
def test_impossible_options_give_one_line(more: list[str], said: str, prompts: Path) -> None:
    assert said in failure(train(prompts, *more))
    assert not (prompts.parent / "head").exists()


def test_a_missing_or_broken_file_is_one_line(prompts: Path) -> None:
    assert "No such file" in failure(train(prompts.parent / "nothing.jsonl"))
    prompts.write_text('{"prompt": "a"}\nnot json\n')
    assert "line 2" in failure(train(prompts))


@pytest.mark.slow
def test_other_options_for_a_run_that_has_begun_are_refused(prompts: Path) -> None:
    assert train(prompts).exit_code == 0
    assert "was made with other options" in failure(train(prompts, "--rate", "0.001", "--quiet"))
    assert train(prompts).exit_code == 0


def test_a_folder_in_the_way_is_refused_before_any_work(prompts: Path) -> None:
    (prompts.parent / "head").mkdir()
    (prompts.parent / "head" / "mine.txt").write_text("keep")
    assert "holds no head. Name a new folder" in failure(train(prompts))
    assert not (prompts.parent / "head.work").exists()
    assert "--out must name a new folder" in failure(train(prompts, "--out", "."))


def test_few_prompts_make_a_drafter_that_is_not_measured(prompts: Path) -> None:
    prompts.write_text("".join(json.dumps({"prompt": "abcdefgh"[i] * 3}) + "\n" for i in range(8)))
    assert not any(Prompts(prompts).held)
    result = train(prompts)
    assert result.exit_code == 0, result.output
    assert "not measured" in result.stderr.splitlines()[-1]
    assert "was not measured" in (prompts.parent / "head" / "README.md").read_text()


def test_nothing_but_held_out_prompts_is_one_line(prompts: Path) -> None:
    rows = [line for line in prompts.read_text().splitlines() if is_held(json.loads(line)["prompt"])]
    prompts.write_text(rows[0] + "\n")
    assert "there is nothing to train on. Give more prompts" in failure(train(prompts, "--quiet"))


def test_the_onednn_cache_is_bounded_unless_the_user_sets_it(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "9")
    failure(train(prompts, "--kind", "nothing"))
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    assert os.environ["LRU_CACHE_CAPACITY"] == "9"


def test_damaged_settings_next_to_the_answers_are_one_line(prompts: Path) -> None:
    work = prompts.parent / "head.work"
    work.mkdir()
    (work / "answers.jsonl").write_text("{}\n")
    for damage in ("[1]", "{"):
        (work / "answers.settings.json").write_text(damage)
        assert "is damaged" in failure(train(prompts, "--quiet"))
