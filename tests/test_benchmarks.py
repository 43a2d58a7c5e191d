"""The benchmarks' arithmetic: a number is worth what its script counts. No timings here."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paceline import Sampling, Tree
from paceline.testing import Oracle, run, tiny_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
common = import_module("common")

LIMIT = 1e-3


def prompts_of(**sizes):
    prompts = [(name, i) for name, size in sizes.items() for i in range(size)]
    return [common.Prompt(id, name, f"{name} {i}") for id, (name, i) in enumerate(prompts)]


def test_pick_is_even_over_categories_and_always_the_same():
    prompts = prompts_of(writing=5, math=40, qa=40)
    chosen = common.pick(prompts, 12)
    assert Counter(p.category for p in chosen) == {"writing": 4, "math": 4, "qa": 4}
    assert chosen == common.pick(prompts, 12)
    assert len({p.id for p in chosen}) == 12
    assert [p.category for p in chosen[:3]] == ["writing", "math", "qa"]


def test_pick_fills_up_from_larger_categories_where_one_is_too_small():
    chosen = common.pick(prompts_of(writing=2, math=40, qa=40), 13)
    assert Counter(p.category for p in chosen) == {"writing": 2, "math": 6, "qa": 5}


def test_pick_spreads_over_a_category():
    chosen = common.pick(prompts_of(math=40), 4)
    assert [p.text for p in chosen] == ["math 0", "math 10", "math 20", "math 30"]


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_pick_gives_what_there_is(count):
    assert len(common.pick(prompts_of(a=3, b=4), count)) == min(count, 7)


def test_load_prompts_takes_the_first_turn(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": 3, "category": "qa", "turns": ["one", "two"]}) + "\n", encoding="utf-8")
    assert common.load_prompts(path) == [common.Prompt(3, "qa", "one")]


def test_load_prompts_says_what_is_missing(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        common.load_prompts(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("a", "b", "at"), [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1)]
)
def test_first_difference(a, b, at):
    assert common.first_difference(a, b) == at


def row(**logits):
    """Logits of six tokens: those named as t0..t5, the rest far below."""
    out = torch.full((6,), -10.0)
    for name, value in logits.items():
        out[int(name[1:])] = value
    return out


def test_equal_texts_do_not_diverge():
    assert common.classify(1, [4, 2], [4, 2], [row(t4=1), row(t2=1)], LIMIT) is None


def test_a_near_tie_is_excused():
    found = common.classify(7, [4, 3], [4, 2], [row(t4=1), row(t2=1.0, t3=0.9995)], LIMIT)
    assert (found.prompt, found.position, found.ours, found.theirs) == (7, 1, 3, 2)
    assert found.margin == pytest.approx(0.0005, abs=1e-6)
    assert found.excused


def test_a_clear_choice_is_not_excused():
    found = common.classify(7, [4, 3], [4, 2], [row(t4=1), row(t2=1.0, t3=0.99)], LIMIT)
    assert found.margin == pytest.approx(0.01, abs=1e-6)
    assert not found.excused


def test_a_third_token_is_not_excused_by_the_tie_of_two_others():
    found = common.classify(7, [5], [2], [row(t2=1.0, t3=1.0, t5=0.5)], LIMIT)
    assert found.margin == 0.0
    assert found.gap == pytest.approx(0.5)
    assert not found.excused


@pytest.mark.parametrize(("ours", "theirs"), [([4], [4, 2]), ([4, 2], [4])])
def test_a_text_that_ends_early_is_not_excused(ours, theirs):
    found = common.classify(7, ours, theirs, [row(t4=1), row(t2=1.0, t3=1.0)][: len(theirs)], LIMIT)
    assert found.position == 1
    assert not found.excused


def test_bootstrap_interval_holds_the_median_and_repeats():
    values = [1.0, 1.2, 1.4, 1.5, 1.9, 2.0, 2.2, 3.0]
    low, high = common.bootstrap(values)
    assert low < common.median(values) < high
    assert (low, high) == common.bootstrap(values)
    assert low >= min(values)
    assert high <= max(values)


def test_bootstrap_of_one_value_and_of_none():
    assert common.bootstrap([2.5]) == (2.5, 2.5)
    assert all(math.isnan(x) for x in common.bootstrap([]))


def test_provenance_names_what_a_number_needs():
    source = common.provenance(tokens=96)
    assert source.keys() == {"command", "date", "commit", "dirty", "versions", "machine", "settings"}
    assert {"python", "paceline", "torch", "transformers"} <= source["versions"].keys()
    assert {"cpu", "cores", "threads", "load"} <= source["machine"].keys()
    assert source["settings"] == {"tokens": 96}
    json.dumps(source)


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
def model_free():
    return import_module("model_free")


def sample(module, system, prompt, tokens, seconds, repeat=0):
    return module.Sample(
        system, common.Prompt(prompt, "qa", ""), repeat, 0, seconds, module.Reply(list(range(len(tokens))))
    )


def test_ratios_compare_speeds_within_a_question(model_free):
    samples = [
        sample(model_free, "a", 1, "xx", 1.0),
        sample(model_free, "b", 1, "xxxx", 1.0),
        sample(model_free, "a", 2, "xx", 4.0),
        sample(model_free, "b", 2, "xx", 1.0),
    ]
    assert model_free.ratios(samples, "b", "a") == [2.0, 4.0]
    assert model_free.ratios(samples, "a", "a") == [1.0, 1.0]
    assert model_free.total_speed([s for s in samples if s.system == "a"]) == pytest.approx(0.8)


def test_the_order_of_systems_rotates(model_free):
    seen = []
    systems = {name: lambda text, name=name: (seen.append(name), model_free.Reply([1]))[1] for name in "abc"}
    samples = model_free.measure(systems, prompts_of(qa=3), 2)
    assert seen[:3] == ["a", "b", "c"]
    assert ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)] == ["abc", "bca", "cab"] * 2
    assert len(samples) == 18
    assert {(s.system, s.order) for s in samples} == {(name, i) for name in "abc" for i in range(3)}


@pytest.fixture
def rules():
    return import_module("rules")


def rule_sample(module, rule, temperature, tokens, rounds, exact="distribution"):
    return module.Sample(module.Case(0.1, "chain", rule, temperature), 1, tokens, rounds, 0, 0, exact)


def test_rules_are_not_run_where_they_are_match(rules):
    cases = rules.cases([0.1], ["chain", "tree"], [0.0, 0.7])
    assert len(cases) == 2 * (4 + 1)
    assert [c.rule for c in cases if c.temperature == 0] == ["match", "match"]


def test_tokens_per_round_counts_all_tokens_by_all_rounds(rules):
    samples = [rule_sample(rules, "block", 0.7, 30, 10), rule_sample(rules, "block", 0.7, 10, 10)]
    assert rules.tokens_per_round(samples) == 2.0
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


def test_noise_changes_matrices_by_its_share_and_nothing_else(rules):
    plain = {"norm": torch.ones(8), "matrix": torch.randn(300, 300) * 3}
    noisy = rules.Noisy(plain, 0.2)
    assert torch.equal(noisy["norm"], plain["norm"])
    assert (noisy["matrix"] - plain["matrix"]).std() == pytest.approx(0.6, rel=0.03)
    assert torch.equal(noisy["matrix"], noisy["matrix"])
    assert list(noisy) == list(plain)


def test_every_rule_runs_on_a_toy(rules):
    from paceline.drafters.model import DraftModel
    from paceline.testing import tiny_target
    from paceline.types import Tree
    from tests.toys import toy_llm

    llm = toy_llm(DraftModel(tiny_target(seed=9), 37), Tree(4, 2, 2))
    prompts = [common.Prompt(1, "qa", "why?"), common.Prompt(2, "qa", "how?")]
    samples = [s for case in rules.cases([0.1], ["tree"], [0.0, 0.7]) for s in rules.measure(llm, case, prompts, 6)]
    assert len(samples) == 10
    assert {s.exact for s in samples} >= {"distribution", "lossy"}
    assert all(1 <= rules.tokens_per_round([s]) <= 3 for s in samples)


# --- never_slower ---------------------------------------------------------------------------------------------------


def test_prompts_of_random_words_are_the_same_every_time_and_of_several_lengths():
    never_slower = import_module("never_slower")
    questions = [never_slower.Question(1, "qa", "one two three"), never_slower.Question(2, "qa", "three four")]
    made = never_slower.random_words(questions, 12)
    assert made == never_slower.random_words(questions, 12)
    assert {len(q.text.split()) for q in made} == {20, 60, 180}
    assert {word for q in made for word in q.text.split()} == {"one", "two", "three", "four"}


def test_a_spoilt_drafter_drafts_as_much_as_before_and_nothing_that_is_right():
    never_slower = import_module("never_slower")
    target, sampling = tiny_target(), Sampling(max_new_tokens=30)
    text = [1, 2, 3, *run(target, [1, 2, 3], sampling)[0]]
    for drafter in (never_slower.Spoilt(Oracle(text, 1.0, 37), 37), never_slower.Blind(37)):
        tokens, _, stats = run(target, [1, 2, 3], sampling, drafter, Tree.chain(4))
        assert [1, 2, 3, *tokens] == text
        assert stats.drafted >= 4 * 26
        assert stats.accepted <= 4, "of 37 tokens one may be right by chance"


def test_a_category_is_held_by_its_interval_and_a_defeated_case_by_its_median():
    never_slower = import_module("never_slower")

    def case(kind):
        return never_slower.Case("x", kind, [], (), Sampling())

    assert (case("defeated").least, case("category").least) == (0.97, 0.98)
    figures = {"drafter": "d", "median": 1.0, "low": 0.9, "high": 1.1, "drafted_per_round": 0.5, "held": False}
    grid = never_slower.grid([{"case": "qa", "kind": "category", "least": 0.98, "drafters": [figures]}])
    assert grid.rows == [["qa, d", "1.000", "0.900 to 1.100", "0.50", "interval 0.98", "NO"]]
