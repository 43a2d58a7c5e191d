import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidOption, OutOfMemory, TrainingFailed
from paceline.train.documents import Document
from paceline.train.loop import CHECKPOINT, Report, Trainer, TrainPlan
from paceline.train.recipe import Guesses, Teacher, simulate_rounds
from paceline.train.states import States
from tests.support.train_toys import TAPS, TARGET, documents, recipe, selection, trainer

PLAN = TrainPlan(epochs=1, batch=4, rate=5e-3, every=1e9, evaluate=1e9)


class Stop(Exception):
    pass


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trained._recipe.module.named_parameters()}


def stop_after(documents: int):
    def report(at: Report) -> None:
        if at.documents >= documents:
            raise Stop

    return report


@pytest.mark.slow
def test_training_learns_what_the_target_says(tmp_path: Path) -> None:
    before = trainer(tmp_path / "a", replace(PLAN, epochs=0.05)) if (tmp_path / "a").mkdir() is None else None
    (tmp_path / "b").mkdir()
    after = trainer(tmp_path / "b", replace(PLAN, epochs=6))
    assert before is not None
    untrained, trained = before.run(), after.run()
    assert trained.loss < 0.8 * untrained.loss
    assert trained.acceptance is not None
    assert untrained.acceptance is not None
    assert trained.acceptance > untrained.acceptance + 0.3
    assert [entry["documents"] for entry in trained.history] == [6 * 96]


def test_a_seed_makes_a_run_repeatable(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        run = trainer(tmp_path / name, count=16)
        run.run()
        runs.append(weights(run))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    plan = replace(PLAN, epochs=1.5, batch=8, every=0.0)
    whole = trainer(tmp_path / "a", plan)
    whole.run()
    for stop in (8, 72, 104):
        with pytest.raises(Stop):
            trainer(tmp_path / "b", plan, report=stop_after(stop)).run()
    resumed = trainer(tmp_path / "b", plan)
    assert resumed.report().documents == 104
    resumed.run()
    expected = weights(whole)
    assert all(torch.equal(expected[n], p) for n, p in weights(resumed).items())
    assert resumed.report().documents == whole.report().documents == 144


def test_finished_shards_are_not_computed_again_after_a_kill(tmp_path: Path) -> None:
    plan = replace(PLAN, batch=8, every=0.0)
    with pytest.raises(Stop):
        trainer(tmp_path, plan, report=stop_after(72)).run()
    states = States(TARGET, selection(documents(96)), TAPS)
    asked: list[int] = []
    shard = states.shard
    states.shard = lambda number: (asked.append(number), shard(number))[1]  # type: ignore[method-assign]
    held = States(TARGET, selection(documents(16, seed=1)), TAPS)
    Trainer(recipe(), states, held, plan, tmp_path, "toy").run()
    assert asked == [1]


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, replace(PLAN, epochs=0.1)).run()
    with pytest.raises(InvalidOption, match=r"other options or other data\. Repeat the command"):
        trainer(tmp_path, replace(PLAN, epochs=0.1), identity="other")
    with pytest.raises(InvalidOption):
        trainer(tmp_path, replace(PLAN, epochs=0.1, rate=1e-4))


@pytest.mark.slow
def test_an_interrupted_run_can_be_made_shorter_or_longer(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trainer(tmp_path, replace(PLAN, epochs=3, every=0.0), report=stop_after(60)).run()
    assert trainer(tmp_path, replace(PLAN, epochs=1, every=0.0)).run().documents == 96
    assert trainer(tmp_path, replace(PLAN, epochs=1.5, every=0.0)).run().documents == 144


@pytest.mark.parametrize("data", [b"", b"hello world\n", pickle.dumps([1], 2), pickle.dumps(print, 2)])
def test_files_that_are_no_checkpoint_are_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(data)
    with pytest.raises(TrainingFailed, match=r"cannot be read .*Delete it"):
        trainer(tmp_path)


def test_a_resumed_run_keeps_its_number_of_steps(tmp_path: Path) -> None:
    trainer(tmp_path, replace(PLAN, epochs=0.1)).run()
    states = States(TARGET, selection(documents(96)), TAPS)
    with pytest.raises(InvalidOption, match="other options"):
        Trainer(recipe(steps=2), states, states, PLAN, tmp_path, "toy")


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, replace(PLAN, epochs=0.1)).run()
    kept = tmp_path / CHECKPOINT
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(TrainingFailed, match="cannot be read"):
        trainer(tmp_path, replace(PLAN, epochs=0.1))


def test_a_nan_loss_ends_training_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(PLAN, every=0.0))
    steps = 0
    guess = run._recipe.guess

    def sick(batch):
        nonlocal steps
        steps += 1
        made = guess(batch)
        return replace(made, loss=made.loss * (torch.nan if steps == 3 else 1.0))

    run._recipe.guess = sick  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed, match=r"the loss became nan.*after 8 documents"):
        run.run()
    assert trainer(tmp_path, replace(PLAN, every=0.0)).report().documents == 8


def test_running_out_of_memory_halves_the_parts_and_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plan = replace(PLAN, batch=8)
    run, sizes = trainer(tmp_path / "a", plan, count=24), []
    guess = run._recipe.guess

    def hungry(batch):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return guess(batch)

    run._recipe.guess = hungry  # type: ignore[method-assign]
    run._evaluate = lambda: None  # type: ignore[method-assign]
    run.run()
    assert sizes == [8, 4, *[2] * 12]
    whole = trainer(tmp_path / "b", plan, count=24)
    whole.run()
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], weight, atol=2e-2, rtol=0)


def test_a_batch_of_one_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def hungry(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run._recipe.guess = hungry  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory, match="a training step over one document"):
        run.run()


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingFailed, match=r"No space left on device.*Free disk space"):
        trainer(tmp_path, replace(PLAN, epochs=0.1)).run()
    assert not list(tmp_path.iterdir())


def test_a_walk_takes_accepted_guesses_and_one_more() -> None:
    right = torch.tensor([[[1, 0, 1, 1, 0, 0]], [[1, 1, 1, 0, 1, 0]]]).bool()
    real = torch.ones_like(right)
    # place 0 accepts 2 -> place 3; it accepts 1 -> place 5; it accepts none.
    assert simulate_rounds(Guesses(torch.tensor(0.0), right, real)) == (6, 3)


def test_a_walk_ends_with_its_document() -> None:
    right = torch.ones(3, 2, 4, dtype=torch.bool)
    real = torch.ones(3, 2, 4, dtype=torch.bool)
    real[:, 1, 2:] = False
    assert simulate_rounds(Guesses(torch.tensor(0.0), right & real, real)) == (6, 2)


def test_however_short_the_plan_one_batch_is_learnt_from(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(PLAN, epochs=0.001), count=16)
    before = weights(run)
    run.run()
    assert any(not torch.equal(before[name], weight) for name, weight in weights(run).items())


def test_without_held_out_documents_nothing_is_said_of_them(tmp_path: Path) -> None:
    none = States(TARGET, selection([]), TAPS)
    states = States(TARGET, selection(documents(8)), TAPS)
    assert Trainer(recipe(), states, none, PLAN, tmp_path, "toy").run().acceptance is None


def test_documents_without_a_guess_are_passed_over(tmp_path: Path) -> None:
    empty = [Document((1,), (2,)), Document((1, 2), ()), Document((3,), ())]
    states = States(TARGET, selection(empty), TAPS)
    run = Trainer(recipe(), states, states, PLAN, tmp_path, "toy")
    before = weights(run)
    report = run.run()
    assert (report.documents, report.tokens, report.loss) == (3, 0, 0.0)
    assert all(torch.equal(before[name], weight) for name, weight in weights(run).items())


def test_random_draws_of_a_recipe_do_not_depend_on_resuming(tmp_path: Path) -> None:
    def drawing(report: object = None) -> tuple[Trainer, list[float]]:
        run = trainer(tmp_path, replace(PLAN, every=0.0), count=24, **({"report": report} if report else {}))
        drawn: list[float] = []
        guess = run._recipe.guess
        run._recipe.guess = lambda batch: (drawn.append(float(torch.rand(()))), guess(batch))[1]  # type: ignore[method-assign]
        return run, drawn

    run, first = drawing(stop_after(12))
    with pytest.raises(Stop):
        run.run()
    resumed, rest = drawing()
    resumed.run()
    (tmp_path / CHECKPOINT).unlink()
    whole, drawn = drawing()
    whole.run()
    assert (len(first), first + rest[:3]) == (3, drawn[:6])


def test_a_drafter_is_trained_where_its_target_is(tmp_path: Path) -> None:
    class Elsewhere(States):
        device = torch.device("meta")

    run = Trainer(recipe(), Elsewhere(TARGET, selection(documents(4)), TAPS), None, PLAN, tmp_path, "toy")  # type: ignore[arg-type]
    assert {p.device.type for p in run._recipe.module.parameters()} == {"meta"}


def test_a_teacher_keeps_its_tokens_where_its_target_is() -> None:
    class Elsewhere:
        def head(self) -> torch.Tensor:
            return torch.empty(9, 4, device="meta")

    teacher = Teacher(Elsewhere(), torch.arange(3))  # type: ignore[arg-type]
    assert teacher.vocabulary.device.type == teacher.rows.device.type == "meta"
