from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidData, InvalidOption
from paceline.sampling.parameters import Sampling
from paceline.train.answers import Answer, AnswerPlan, derive_seed, parse_answer
from paceline.train.prompts import Prompts
from paceline.train.writing import Progress, write_answers
from tests.support.toys import toy_llm
from tests.support.training_data import some_prompts, words, write_rows

PLAN = AnswerPlan(answer_tokens=8, width=4)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the answers to five prompts, written in one run."""
    folder = tmp_path_factory.mktemp("whole")
    progress = write_answers(toy_llm(), some_prompts(folder / "p.jsonl", 5), folder / "answers.jsonl", PLAN)
    assert (progress.total, progress.kept, progress.written, progress.skipped) == (10, 0, 10, 0)
    return folder / "answers.jsonl"


def test_every_prompt_is_answered_as_without_the_others(whole: Path) -> None:
    llm, asked = toy_llm(), {f"p{i}": text for i, text in enumerate(words(5))}
    rows = rows_of(whole)
    assert {(row["id"], row["temperature"]) for row in rows} == {(name, t) for name in asked for t in (0.0, 0.8)}
    for row in rows[:4]:
        how = Sampling(max_new_tokens=8, temperature=row["temperature"], seed=derive_seed(0, row["id"]))
        alone = llm.generate(asked[row["id"]], how)
        assert (row["token_ids"], row["answer"]) == (alone.token_ids, alone.text)
        assert row["ended"] == (alone.finish_reason == "eos")
    assert [row["id"] for row in rows[::2]] != list(asked), "prompts are shuffled, so that the first few stand for all"


def test_another_width_changes_nothing_and_another_seed_does(whole: Path, tmp_path: Path) -> None:
    prompts = some_prompts(tmp_path / "p.jsonl", 5)
    write_answers(toy_llm(), prompts, tmp_path / "wide" / "answers.jsonl", replace(PLAN, width=16))
    write_answers(toy_llm(), prompts, tmp_path / "seed" / "answers.jsonl", replace(PLAN, seed=1))
    assert (tmp_path / "wide" / "answers.jsonl").read_bytes() == whole.read_bytes()
    other = {(row["id"], row["temperature"]): row["answer"] for row in rows_of(tmp_path / "seed" / "answers.jsonl")}
    same = [other[row["id"], row["temperature"]] == row["answer"] for row in rows_of(whole) if row["temperature"]]
    assert not all(same)


def test_ctrl_c_leaves_a_file_that_is_used_and_continued(whole: Path, tmp_path: Path) -> None:
    prompts, path = some_prompts(tmp_path / "p.jsonl", 5), tmp_path / "answers.jsonl"

    def interrupt(progress: Progress) -> None:
        if progress.written == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(toy_llm(), prompts, path, PLAN, interrupt)
    first = rows_of(path)
    assert len(first) == 5
    seen: list[int] = []
    progress = write_answers(toy_llm(), prompts, path, PLAN, lambda progress: seen.append(progress.tokens))
    assert (progress.kept, progress.written) == (5, 5)
    new = [row for row in rows_of(path) if row not in first]
    assert seen == list(range(1, sum(len(row["token_ids"]) for row in new) + 1)), "nothing was written twice"
    assert path.read_bytes() == whole.read_bytes()
    assert write_answers(toy_llm(), prompts, path, PLAN).tokens == 0


def test_answers_that_ended_in_any_order_are_put_in_the_plans(whole: Path, tmp_path: Path) -> None:
    prompts, path = some_prompts(tmp_path / "p.jsonl", 5), tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:3:-1]))
    shutil.copy(whole.with_suffix(".settings.json"), tmp_path)
    assert write_answers(toy_llm(), prompts, path, PLAN).written == 4
    assert path.read_bytes() == whole.read_bytes()


SCRIPT = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from paceline.train.answers import AnswerPlan
from paceline.train.prompts import Prompts
from paceline.train.writing import write_answers
from tests.support.toys import toy_llm
folder = Path(sys.argv[1])
write_answers(toy_llm(), Prompts(folder / "p.jsonl"), folder / "answers.jsonl", AnswerPlan(answer_tokens=8, width=4),
              lambda progress: time.sleep(0.02))
"""


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_file(whole: Path, tmp_path: Path) -> None:
    prompts, path = some_prompts(tmp_path / "p.jsonl", 5), tmp_path / "answers.jsonl"
    root = Path(__file__).parents[2]
    known = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], env=os.environ | {"PYTHONPATH": known})
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    kept = path.read_bytes().count(b"\n")
    assert kept < 10
    with path.open("ab") as file:
        file.write(b'{"id": "p3", "temperature": 0.0, "ans')  # as a kill inside the write would leave it
    progress = write_answers(toy_llm(), prompts, path, PLAN)
    assert (progress.kept, progress.written) == (kept, 10 - kept)
    assert path.read_bytes() == whole.read_bytes()


def test_a_prompt_that_cannot_be_answered_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "good"}, {"prompt": "x" * 40}, {"messages": [{"role": "user", "content": "fine"}]}]
    prompts, path = Prompts(write_rows(tmp_path / "p.jsonl", rows)), tmp_path / "answers.jsonl"
    progress = write_answers(toy_llm(context_length=32), prompts, path, PLAN)
    assert (progress.done, progress.skipped, {row["id"] for row in rows_of(path)}) == (4, 2, {1, 3})
    only = Prompts(write_rows(tmp_path / "q.jsonl", rows[1:2]))
    with pytest.raises(InvalidData, match=r"none of the 1 prompts could be answered .*has 50 tokens"):
        write_answers(toy_llm(context_length=32), only, tmp_path / "none" / "answers.jsonl", PLAN)


def test_a_failed_answer_does_not_change_the_others(tmp_path: Path) -> None:
    class Banned(AnswerPlan):
        def sampling(self, name: str | int, temperature: float) -> Sampling:
            bans = dict.fromkeys(range(37), -float("inf")) if name == "p1" else {}
            return Sampling(max_new_tokens=4, logit_bias=bans)

    progress = write_answers(
        toy_llm(), some_prompts(tmp_path / "p.jsonl", 3), tmp_path / "a.jsonl", Banned((0.0,), width=3)
    )
    assert (progress.written, progress.skipped) == (2, 1)
    assert {row["id"] for row in rows_of(tmp_path / "a.jsonl")} == {"p0", "p2"}


def test_a_file_is_continued_by_the_same_command_only(tmp_path: Path) -> None:
    prompts, path = some_prompts(tmp_path / "p.jsonl", 1), tmp_path / "answers.jsonl"
    plan = AnswerPlan((0.0,), answer_tokens=2)
    write_answers(toy_llm(), prompts, path, plan)
    for other, said in (
        (replace(plan, answer_tokens=3), "answer tokens 2, not 3"),
        (replace(plan, seed=5), "seed 0, not 5"),
        (replace(plan, temperatures=(0.0, 1.0)), "temperatures"),
    ):
        with pytest.raises(InvalidData, match=f"made with {said}"):
            write_answers(toy_llm(), prompts, path, other)
    with pytest.raises(InvalidData, match="made with prompts"):
        write_answers(toy_llm(), some_prompts(tmp_path / "q.jsonl", 2), path, plan)
    (tmp_path / "answers.settings.json").unlink()
    with pytest.raises(InvalidData, match=r"exists without answers\.settings\.json"):
        write_answers(toy_llm(), prompts, path, plan)
    path.unlink()
    assert write_answers(toy_llm(), prompts, path, replace(plan, seed=5)).written == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b'{"id": "p9", "temperature": 0.0, "answer": "a"}\n', "line 2: the plan has no prompt 'p9'"),
        (b'{"id": "p0", "temperature": 0.5, "answer": "a"}\n', "line 2: the plan has no prompt .* temperature 0.5"),
        (b'{"id": "p0", "temperature": 0.0, "answer": "a"}\n', "line 2: this is a second answer to 'p0'"),
        (b"\x00\x00\n", "line 2: not valid JSON"),
    ],
)
def test_damage_inside_the_file_is_named(tmp_path: Path, damage: bytes, said: str) -> None:
    prompts, path = some_prompts(tmp_path / "p.jsonl", 1), tmp_path / "answers.jsonl"
    write_answers(toy_llm(), prompts, path, AnswerPlan((0.0,), answer_tokens=1))
    with path.open("ab") as file:
        file.write(damage)
    with pytest.raises(InvalidData, match=said):
        write_answers(toy_llm(), prompts, path, AnswerPlan((0.0,), answer_tokens=1))


def test_answers_come_back_as_they_were_written() -> None:
    for answer in (Answer(1, 0.0, "a"), Answer("1", 0.8, "\ud7ff\n", True, (3, 36)), Answer(2, 1.0, "", False)):
        assert parse_answer(json.dumps(answer.as_dict()).encode()) == answer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": None}, "'id' must be .* got nothing"),
        ({"id": True}, "'id' must be .* got True"),
        ({"temperature": "0"}, "'temperature' must be a number, got '0'"),
        ({"answer": 3}, "'answer' must be text, got 3"),
        ({"ended": "yes"}, "'ended' must be true or false, .*got 'yes'"),
        ({"token_ids": 5}, "'token_ids' must be .* got 5"),
        ({"token_ids": [1, -1]}, "must contain only integers >= 0"),
    ],
)
def test_a_malformed_answer_says_what_is_wrong(change: dict[str, Any], said: str) -> None:
    row = {"id": 1, "temperature": 0.5, "answer": "a", "ended": True, "token_ids": [1]} | change
    with pytest.raises(ValueError, match=said):
        parse_answer(json.dumps(row).encode())


def test_a_mix_without_sense_is_refused() -> None:
    for temperatures in ((), (0.0, 0.0), (-1.0,)):
        with pytest.raises(InvalidOption):
            AnswerPlan(temperatures)
    with pytest.raises(InvalidOption):
        AnswerPlan(answer_tokens=0)
