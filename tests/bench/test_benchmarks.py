"""The benchmarks' arithmetic, without timings."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paceline import DraftBudget, Sampling
from paceline.engine.stats import Stats
from paceline.testing import Oracle, run
from tests.support.cover import some
from tests.support.toys import toy_target

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
common, parity = import_module("common"), import_module("parity")

LIMIT = 1e-3


def test_load_prompts_takes_the_first_turn(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": 3, "category": "qa", "turns": ["one", "two"]}) + "\n", encoding="utf-8")
    assert common.load_prompts(path) == [common.Question(3, "qa", "one")]


def test_load_prompts_names_a_missing_file(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        common.load_prompts(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("a", "b", "at"), [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1)]
)
def test_first_difference(a, b, at):
    assert parity.first_difference(a, b) == at


def row(**logits):
    """Return logits of six tokens: given values for t0 to t5, and low values for the others."""
    out = torch.full((6,), -10.0)
    for name, value in logits.items():
        out[int(name[1:])] = value
    return out


def test_equal_texts_do_not_diverge():
    assert parity.classify(1, [4, 2], [4, 2], [row(t4=1), row(t2=1)], LIMIT) is None


def test_a_near_tie_is_excused():
    found = parity.classify(7, [4, 3], [4, 2], [row(t4=1), row(t2=1.0, t3=0.9995)], LIMIT)
    assert (found.prompt, found.position, found.ours, found.theirs) == (7, 1, 3, 2)
    assert found.margin == pytest.approx(0.0005, abs=1e-6)
    assert found.excused


def test_a_clear_choice_is_not_excused():
    found = parity.classify(7, [4, 3], [4, 2], [row(t4=1), row(t2=1.0, t3=0.99)], LIMIT)
    assert found.margin == pytest.approx(0.01, abs=1e-6)
    assert not found.excused


def test_a_third_token_is_not_excused_by_the_tie_of_two_others():
    found = parity.classify(7, [5], [2], [row(t2=1.0, t3=1.0, t5=0.5)], LIMIT)
    assert found.margin == 0.0
    assert found.gap == pytest.approx(0.5)
    assert not found.excused


@pytest.mark.parametrize(("ours", "theirs"), [([4], [4, 2]), ([4, 2], [4])])
def test_a_text_that_ends_early_is_not_excused(ours, theirs):
    found = parity.classify(7, ours, theirs, [row(t4=1), row(t2=1.0, t3=1.0)][: len(theirs)], LIMIT)
    assert found.position == 1
    assert not found.excused


def test_results_are_written_with_their_date(tmp_path):
    grid = common.Grid("Speed", ["system", "tok/s"], [["plain", "20.0"]])
    source = common.provenance()
    path = common.write("trial", {"provenance": source, "x": 1}, [grid], ["a line"], tmp_path)
    assert path == tmp_path / f"{source['date'][:10]}-trial.json"
    assert json.loads(path.read_text(encoding="utf-8"))["x"] == 1
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "| plain | 20.0 |" in text
    assert "- a line" in text


@pytest.fixture
def rules():
    return import_module("rules")


def rule_sample(module, rule, temperature, tokens, rounds, guarantee="distribution"):
    return module.Sample(
        module.Case(0.1, "chain", rule, temperature), 1, Stats(0, guarantee, rounds=rounds, tokens=tokens)
    )


def test_rules_that_equal_match_are_not_run(rules):
    cases = rules.cases([0.1], ["chain", "tree"], [0.0, 0.7])
    assert len(cases) == 2 * (4 + 1)
    assert [c.rule for c in cases if c.temperature == 0] == ["match", "match"]


def test_tokens_per_round_counts_all_tokens_by_all_rounds(rules):
    samples = [rule_sample(rules, "block", 0.7, 30, 10), rule_sample(rules, "block", 0.7, 10, 10)]
    assert rules.mean(samples) == 2.0
    low, high = rules.interval(samples)
    assert (low, high) == (1.0, 3.0)


def test_the_table_names_what_each_rule_keeps_and_leaves_out_nothing(rules):
    samples = [rule_sample(rules, "match", 0.0, 40, 10, "bits")]
    samples += [rule_sample(rules, rule, 0.7, 20, 10, label) for rule, label in zip(rules.RULES, "abcd", strict=True)]
    grid = rules.grid(samples, "chain", 0.1, 0.66)
    assert "66%" in grid.title
    assert [row[0] for row in grid.rows] == ["match", "rejection", "block", "typical"]
    assert [row[1] for row in grid.rows] == ["bits", "b", "c", "d"]
    assert [row[2] for row in grid.rows] == ["4.00 [4.00, 4.00]", *["as match"] * 3]
    assert all(row[3] == "2.00 [2.00, 2.00]" for row in grid.rows)


def test_noise_changes_only_matrices_by_its_share(rules):
    plain = {"norm": torch.ones(8), "matrix": torch.randn(300, 300) * 3}
    noisy = rules.Noisy(plain, 0.2)
    assert torch.equal(noisy["norm"], plain["norm"])
    assert (noisy["matrix"] - plain["matrix"]).std() == pytest.approx(0.6, rel=0.03)
    assert torch.equal(noisy["matrix"], noisy["matrix"])
    assert list(noisy) == list(plain)


def test_every_rule_runs_on_a_toy(rules):
    from paceline.drafters.model import DraftModel
    from paceline.types import DraftBudget
    from tests.support.toys import toy_llm

    llm = toy_llm(DraftModel(toy_target(seed=9, layers=1), 37), DraftBudget(4, 2, 2))
    prompts = [common.Question(1, "qa", "why?"), common.Question(2, "qa", "how?")]
    samples = [s for case in rules.cases([0.1], ["tree"], [0.0, 0.7]) for s in rules.measure(llm, case, prompts, 6)]
    assert len(samples) == 10
    assert {s.stats.guarantee for s in samples} >= {"distribution", "lossy"}
    assert all(1 <= rules.mean([s]) <= 3 for s in samples)


# --- never_slower ---------------------------------------------------------------------------------------------------


@some("name", ["SmolVLM-256M", "Gemma-3-4B"], fast=["SmolVLM-256M"])
def test_pictures_are_encoded_by_both_programs(name, tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    pictures = import_module("pictures")
    small = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"image_size": 32, "patch_size": 8}
    shape = pictures.SHAPES[name]
    config = {**shape.config, "vision_config": {**shape.config["vision_config"], **small}}
    config["text_config"] = {**shape.config["text_config"], "hidden_size": 72}
    settings, rows = {"size": {"height": 32, "width": 32}}, 4
    if name == "Gemma-3-4B":
        config["mm_tokens_per_image"] = 4
    else:
        config["scale_factor"] = 2
        settings, rows = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, 20
    monkeypatch.setattr(pictures, "SHAPES", {name: pictures.Shape(config, settings)})
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--sides", "48", "--repeats", "1", "--out", str(tmp_path)])
    pictures.main()
    (file,) = tmp_path.glob("*.json")
    costs = json.loads(file.read_text())["costs"]
    assert [(cost["dtype"], cost["program"]) for cost in costs] == [
        (dtype, program) for dtype in ("float32", "bfloat16") for program in ("paceline", "transformers")
    ]
    assert {(cost["shape"], cost["side"], cost["rows"]) for cost in costs} == {(name, 48, rows)}
    assert "| rows |" in file.with_suffix(".md").read_text()


def test_prompts_of_random_words_are_the_same_every_time_and_of_several_lengths():
    never_slower = import_module("never_slower")
    questions = [never_slower.Question(1, "qa", "one two three"), never_slower.Question(2, "qa", "three four")]
    made = never_slower.random_words(questions, 12)
    assert made == never_slower.random_words(questions, 12)
    assert {len(q.text.split()) for q in made} == {20, 60, 180}
    assert {word for q in made for word in q.text.split()} == {"one", "two", "three", "four"}


def test_a_wrong_drafter_drafts_the_full_budget_and_is_never_right():
    never_slower = import_module("never_slower")
    target, sampling = toy_target(layers=1), Sampling(max_new_tokens=30)
    text = [1, 2, 3, *run(target, [1, 2, 3], sampling)[0]]
    for drafter in (never_slower.WrongDrafter(Oracle(text, 1.0, 37), 37), never_slower.RandomDrafter(37)):
        tokens, _, stats = run(target, [1, 2, 3], sampling, drafter, DraftBudget.chain(4))
        assert [1, 2, 3, *tokens] == text
        assert stats.drafted >= 4 * 26
        assert stats.accepted <= 4, "of 37 tokens one may be right by chance"


def test_goals_and_the_summary_of_all_categories():
    never_slower = import_module("never_slower")

    def case(kind):
        return never_slower.Case("x", kind, [], (), Sampling())

    assert [case(kind).least for kind in ("defeated", "first", "category")] == [0.98, 0.98, 0.95]
    figures = {"drafter": "d", "median": 1.0, "low": 0.9, "high": 1.1, "drafted_per_round": 0.5, "held": False}
    cases = [
        {"case": "qa", "kind": "category", "least": 0.95, "drafters": [figures | {"ratios": [r]}]} for r in (0.9, 1.0)
    ]
    grid = never_slower.grid(cases[:1])
    assert grid.rows == [["qa, d", "1.000", "0.900 to 1.100", "0.50", "0.95", "NO"]]
    together = never_slower.summary(cases)[0]["drafters"][0]
    assert (together["median"], together["held"]) == (0.95, False)
