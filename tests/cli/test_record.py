"""`paceline record`, `replay`, `tune` and `--record`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import paceline.bench.replay.prices as prices
import paceline.llm
from paceline.bench.figures import ratio_of_sums
from paceline.bench.replay import search
from paceline.bench.replay.predict import Candidate
from paceline.cli import app
from paceline.drafters import factory
from paceline.drafters.factory import make_drafter, to_tree
from paceline.files.stores import StoredModel
from paceline.llm import LLM
from paceline.recording.file import Recording
from paceline.recording.states import StateFiles, states_folder
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.toys import toy_model


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments of `load`, which returns a toy of a different size for the model "other"."""
    asked: dict[str, Any] = {}

    def load(model: str, *, drafter: Any = None, draft: Any = "auto", **options: Any) -> LLM:
        asked.update(options, model=model)
        loaded = toy_model(context_length=700, layers=3 if model == "other" else 2)
        return LLM(loaded, make_drafter(drafter, loaded, lambda _: loaded), to_tree(draft))

    monkeypatch.setattr(paceline.llm, "load", load)
    return asked


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


_RECORDING = list[bytes]()
"""The file of `recorded`, after its first call."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "r.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ab ab ab", "cd cd cd", "hello")))
    if not _RECORDING:
        done = run("record", str(path), "--prompts", str(prompts), "-n", "24", "--ignore-eos", "-d", "none", "-t", "0")
        assert done.exit_code == 0, done.output
        assert "3 replies recorded" in done.stderr
        _RECORDING.append(path.read_bytes())
    path.write_bytes(_RECORDING[0])
    return path


def test_record_writes_the_replies_that_generate_writes(recorded: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    done = run("generate", "toy", "hello", "-n", "24", "--ignore-eos", "--json", "-t", "0", "--record", str(own), "-q")
    assert done.exit_code == 0, done.output
    (reply,) = Recording(own)
    assert list(reply.reply) == json.loads(done.stdout)["token_ids"] == list(Recording(recorded)[2].reply)
    assert len(Recording(recorded)) == 3


def test_record_stores_hidden_states_with_the_same_replies(recorded: Path, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "own.jsonl"
    done = run(
        *("record", str(path), "--prompts", str(prompts), "-n", "24", "--ignore-eos", "-t", "0", "--batch", "2"),
        *("--states", "1"),
    )
    assert done.exit_code == 0, done.output
    assert {r.reply for r in Recording(path)} == {r.reply for r in Recording(recorded)}
    for reply in Recording(path):
        states = StateFiles(states_folder(path), (1, 0), 0).read(reply.token_ids[:-2])
        assert states
        assert len(states["final"]) == len(reply.token_ids) - 2
    assert not states_folder(recorded).exists()
    assert "hidden states of 3 texts stored in" in done.stderr
    for wrong in (("-d", "suffix"), ("--states", "inf")):
        done = run("record", str(path), "--prompts", str(prompts), "--states", "1", *wrong)
        assert done.exit_code == 1
        assert "--states" in done.stderr


@pytest.mark.slow
def test_draft_vocab_reaches_the_drafters(recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, honest = list[object](), factory.open_drafter

    def opened(*given: Any, **named: Any) -> Any:
        asked.append(named.get("draft_vocab"))
        return honest(*given, **named)

    for user in ("bench.replay.predict", "bench.doctor.run", "bench.systems"):
        monkeypatch.setattr(f"paceline.{user}.open_drafter", opened)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"category": "a", "prompt": "ab ab"}\n')
    vocab = ("--draft-vocab", "16", "-q")
    for command in (
        ("replay", str(recorded), "--drafters", "suffix"),
        ("doctor", "toy", "--drafter", "suffix"),
        ("bench", "--prompts", str(questions), "--count", "1", "--tokens", "8"),
    ):
        before = len(asked)
        done = run(*command, *vocab)
        assert done.exit_code == 0, done.output
        assert set(asked[before:]) == {16}


def test_replay_predicts_named_drafters(recorded: Path, toy: dict[str, Any]) -> None:
    done = run("replay", str(recorded), "--drafters", "suffix,suffix@4,ngram+suffix@7x4x2", "--json", "-q")
    assert done.exit_code == 0, done.output
    assert toy["model"] == "toy", "the recording's own model"
    found = json.loads(done.stdout)
    assert [(row["drafter"], row["draft"], row["exact"]) for row in found["drafters"]] == [
        ("suffix", "auto", False),
        ("suffix", "4", True),
        ("ngram+suffix", "7x4x2", True),
    ]
    assert (found["replies"], found["tokens"]) == (3, 72)
    # The exact prediction equals the counts of generating with that drafter.
    loaded = toy_model(context_length=700, layers=2)
    llm = LLM(loaded, make_drafter("suffix", loaded, lambda _: loaded), DraftBudget.chain(4))
    how = Sampling(max_new_tokens=24, ignore_eos=True)
    stats = [llm.generate(text, how).stats for text in ("ab ab ab", "cd cd cd", "hello")]
    assert found["drafters"][1]["tokens_per_round"] == pytest.approx(72 / sum(s.rounds for s in stats))
    for row in found["drafters"]:
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
        assert row["tokens_per_second"] / row["plain_tokens_per_second"] == pytest.approx(row["ratio"]["value"])


@pytest.mark.slow
def test_replay_shows_a_table(recorded: Path) -> None:
    done = run("replay", str(recorded), "--drafters", "suffix@4,suffix", "-q")
    assert done.exit_code == 0, done.output
    assert "3 replies, 72 tokens; plain decoding" in done.stdout
    assert re.search(r"suffix +│ +4 │.*│ +\d\.\d\d │", done.stdout)
    assert re.search(r"suffix +│ +auto │.*│ +\d\.\d\d ~ │", done.stdout), "a prediction"


def test_tune_prints_a_command_that_exists(recorded: Path) -> None:
    done = run("tune", str(recorded), "--drafters", "suffix,ngram", "-q")
    assert done.exit_code == 0, done.output
    line = done.stdout.partition("fastest: paceline ")[2].splitlines()[0]
    command, *words = line.split()
    assert (command, words[:2]) == ("generate", ["-m", "toy"])
    assert words[2] == "--drafter"
    assert words[3:] == ["none"] or run(command, *words, "hello", "-n", "4", "-q").exit_code == 0


def test_tune_names_the_model_as_its_user_does(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*args: str) -> list[str]:
        done = run("tune", str(recorded), "--drafters", "ngram", "-q", *args)
        assert done.exit_code == 0, done.output
        return done.stdout.partition("fastest: paceline ")[2].splitlines()[0].split()

    assert command("-m", "./the toy")[:4] == ["generate", "-m", "'./the", "toy'"]
    listed = StoredModel("demo", toy_model().path, 1, "paceline")
    monkeypatch.setattr("paceline.files.stores.stored_models", lambda everything: [listed])
    assert command()[:3] == ["generate", "-m", "demo"], "the recording holds the path"


def test_tune_prints_the_options_that_it_measured_with(recorded: Path) -> None:
    done = run(
        "tune", str(recorded), "--drafters", "ngram", "-q", "--dtype", "float32", "--draft-quantize", "none",
        "--threads", "1", "--draft-vocab", "16",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    line = done.stdout.partition("fastest: ")[2].splitlines()[0]
    assert line.startswith(
        "paceline generate -m toy --dtype float32 --threads 1 --draft-quantize none --draft-vocab 16 --drafter "
    )


def test_the_wrong_model_is_refused(recorded: Path) -> None:
    done = run("replay", str(recorded), "-m", "other", "-q")
    assert done.exit_code == 1
    assert "the recording belongs to another model, toy" in done.stderr


def test_a_text_that_the_model_would_not_write_is_refused(recorded: Path) -> None:
    """The text is from another seed, or from other weights in the middle, which the fingerprint does not cover."""
    header, *rows = recorded.read_text().splitlines()
    row = json.loads(rows[0])
    row["reply"] = [(token + 1) % 36 for token in row["reply"]]
    recorded.write_text("\n".join([header, json.dumps(row), *rows[1:]]) + "\n")
    done = run("replay", str(recorded), "-q")
    assert done.exit_code == 1
    assert "of the tokens of a recorded reply" in done.stderr


def test_replays_that_are_impossible_name_the_reason(recorded: Path, tmp_path: Path) -> None:
    assert "no drafter is called 'psychic'" in run("replay", str(recorded), "--drafters", "psychic").stderr
    assert "without sizes" in run("tune", str(recorded), "--drafters", "suffix@3").stderr
    assert "cannot be replayed" in run("replay", str(recorded), "--drafters", "early-exit:1@3").stderr
    recorded.write_text(recorded.read_text().splitlines()[0] + "\n")
    assert "contains no replies" in run("replay", str(recorded)).stderr
    (tmp_path / "text").write_text("hello\n")
    assert "text, line 1: not valid JSON" in run("replay", str(tmp_path / "text")).stderr


# --- the search ----------------------------------------------------------------------------------------------------


def test_lookups_come_first_and_none_behind_itself() -> None:
    best = {name: [Candidate(name, DraftBudget.chain(n)) for n in (3, 5)] for name in ("suffix", "ngram", "eagle3")}
    names = {c.drafter for c in search.cascades(best)}
    assert names == {"suffix+ngram", "ngram+suffix", "suffix+eagle3", "ngram+eagle3"}
    sizes = [c.budget for c in search.cascades(best) if c.drafter == "suffix+eagle3"]
    assert sizes == [None, DraftBudget.chain(3), DraftBudget.chain(5)]
    remembering = dict.fromkeys(("suffix", "suffix:remember"), best["ngram"])
    assert search.cascades(remembering) == [], "one automaton behind the other would say the same"


class Predicted:
    """Stands in for a `CandidatePrediction`."""

    def __init__(self, candidate: Candidate, value: float, spread: float = 0.01) -> None:
        self.candidate = candidate
        self.speedup = {"value": value, "low": value - spread, "high": value + spread}


class Fake:
    """Stands in for a `Predictor`: has a speed for each candidate, and records candidates replayed over all replies."""

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds, self.long = speeds, list[str]()

    def predict(self, candidate: Candidate, replies: list[Any]) -> Any:
        if len(replies) > 20:
            self.long.append(candidate.name)
        return Predicted(candidate, self.speeds.get(candidate.name, 0.9))


def test_the_fastest_of_all_is_found_with_few_long_replays() -> None:
    fake: Any = Fake({"eagle3@3": 1.3, "suffix+eagle3@3": 1.5, "suffix@7": 1.1, "ngram@15": 1.05})
    found = search.search(fake, list(range(40)), ["suffix", "ngram", "eagle3"], lambda name: None)  # type: ignore[arg-type]
    assert found[0].candidate.name == "suffix+eagle3@3"
    assert {"suffix@7", "ngram@15", "eagle3@3"} <= set(fake.long), "one of each"
    assert len(fake.long) <= 8


def test_nothing_is_recommended_that_may_be_slower() -> None:
    sure, unsure = Predicted(Candidate("a"), 1.05, 0.02), Predicted(Candidate("b"), 1.2, 0.3)
    assert search.recommended([unsure, sure]) is sure  # type: ignore[list-item,comparison-overlap]
    assert search.recommended([unsure]) is None  # type: ignore[list-item]


def test_a_ratio_of_sums_has_an_interval_that_shrinks() -> None:
    few = ratio_of_sums([2.0, 4.0, 1.0], [1.0, 2.0, 1.0])
    assert few["value"] == pytest.approx(7 / 4)
    assert few["low"] < few["value"] < few["high"]
    many = ratio_of_sums([2.0, 4.0, 1.0] * 30, [1.0, 2.0, 1.0] * 30)
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 2


def test_choices_are_priced_once_for_each_kind_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    model, timed = toy_model(), list[float]()

    class Timed:
        def choice_seconds(self, _: Any, sampling: Sampling) -> float:
            timed.append(sampling.temperature)
            return sampling.temperature

    measured: Any = prices.MeasuredPrices(model, None, Timed())  # type: ignore[arg-type]
    assert [measured.choice(Sampling(temperature=t, seed=s)) for t, s in ((0.5, 1), (0.5, 2), (0.7, 1))] == [
        0.5,
        0.5,
        0.7,
    ]
    assert timed == [0.5, 0.7]
