"""Counts, times and conclusions of `paceline doctor`. No test depends on the speed of this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from typer.testing import CliRunner

import paceline.llm
from paceline.bench.costs import PREFIX, PassTimer, lengthen, passes
from paceline.bench.doctor import advice
from paceline.bench.doctor import run as examination
from paceline.bench.doctor.acceptance import (
    Acceptance,
    Gain,
    TextKind,
    observe,
    stored,
    stored_drafters,
    write_replies,
)
from paceline.bench.doctor.machine import Machine, bandwidth, by_threads
from paceline.bench.doctor.predict import Drafting, forecast, overall_speedup
from paceline.bench.doctor.weights import quantised_bytes, weight_bytes
from paceline.bench.replay.predict import format_budget
from paceline.bench.replay.prices import MeasuredPrices
from paceline.checkpoints.loader import load_model
from paceline.cli import app
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.heads import ExitConfig
from paceline.protocols import KVCache
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.testing import Oracle, tiny_target
from paceline.types import DraftBudget, Forward, Rows, Want
from paceline.verify.tree import PREFILL_ROWS
from tests.support.gguf_writing import write_gguf
from tests.support.toys import toy_llm, toy_model, toy_target

SIZES = {
    "chains": [DraftBudget.chain(n) for n in (1, 2, 4, 6)],
    "trees": [DraftBudget(1, 1, 3), DraftBudget(4, 4, 3), DraftBudget(9, 4, 3)],
}


class FakeTimer:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- what drafts would have given ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIZES)
def test_every_size_is_observed_as_in_real_use(kind: str) -> None:
    model, sizes = toy_model(), SIZES[kind]
    texts = {"a": ["ab ab ab"], "b": ["cd cd cd cd", "q"]}
    found, _ = observe(model, Suffix(), sizes, write_replies(model, texts, 24))
    assert list(found.kinds) == ["a", "b"]
    for size in sizes:
        done = [LLM(model, Suffix(), size).generate(text, Sampling(max_new_tokens=24)) for text in texts["b"]]
        tokens, rounds = sum(len(c.token_ids) for c in done), sum(c.stats.rounds for c in done)
        assert found.kinds["b"].gains[size].tokens == pytest.approx(tokens / rounds)
    assert found.kinds["b"].gains[sizes[-1]].rows >= 4
    assert found.kinds["b"].prompt == sum(len(toy_llm().prompt_ids(text)) for text in texts["b"]) / 2
    assert found.source == "observed here, over 3 short replies"


def test_early_exit_is_observed_as_in_generation() -> None:
    model, sizes = toy_model(), SIZES["chains"]
    drafter = EarlyExit(ExitConfig(32, 1), {}, model.target, threshold=0.0)
    found, seconds = observe(model, drafter, sizes, write_replies(model, {"a": ["ab ab ab"]}, 24))
    for size in sizes:
        again = EarlyExit(ExitConfig(32, 1), {}, model.target, threshold=0.0)
        stats = LLM(model, again, size).generate("ab ab ab", Sampling(max_new_tokens=24)).stats
        assert found.kinds["a"].gains[size].tokens == pytest.approx(stats.tokens / stats.rounds)
    assert all(taken > 0 for taken in seconds.values())


def test_a_drafter_that_errs_is_seen_to_err() -> None:
    model, size = toy_model(), DraftBudget.chain(4)
    how = Sampling(max_new_tokens=40, ignore_eos=True, seed=0)
    done = toy_llm().generate("ab ab ab", how)
    reply = RecordedReply(tuple(toy_llm().prompt_ids("ab ab ab")), tuple(done.token_ids), "length", how)
    tokens = []
    for accuracy in (0.0, 0.6, 1.0):
        found, _ = observe(model, Oracle(reply.token_ids, accuracy, 37), [size], {"a": [reply]})
        tokens.append(found.kinds["a"].gains[size].tokens)
    assert tokens[0] == 1.0
    assert tokens[2] == 5.0
    assert tokens[0] < tokens[1] < tokens[2]


def test_a_reply_without_drafts_still_has_rounds() -> None:
    model, size = toy_model(), DraftBudget.chain(4)
    found, seconds = observe(model, NGram(max_n=9, min_n=9), [size], write_replies(model, {"a": ["q"]}, 5))
    assert found.kinds["a"].gains[size] == Gain(1.0, 4.0)
    assert seconds[size] < 1.0


# --- what is stored -----------------------------------------------------------------------------------------------


def demo() -> Any:
    model = toy_model()
    return type(model)(model.target, model.tokenizer, model.eos, {}, Path("SmolLM2-135M-Instruct.Q4_1.gguf"))


def test_stored_acceptance_applies_only_to_the_demo_model() -> None:
    assert {"eagle3", "suffix", "ngram", "medusa"} <= set(stored_drafters(demo()))
    assert stored_drafters(toy_model()) == []
    assert stored(toy_model(), "suffix", [DraftBudget(15, 15, 3)]) is None
    assert examination.choose_drafters(toy_model(), None) == examination.choose_drafters(demo(), "auto") == ["suffix"]
    assert examination.choose_drafters(demo(), "none") == []


@pytest.mark.parametrize(
    ("drafter", "sizes"),
    [
        ("eagle3", [DraftBudget.chain(n) for n in (1, 2, 3, 4, 5)]),
        ("ngram", [DraftBudget.chain(n) for n in (1, 2, 4, 6, 10, 15)]),
        ("suffix", [DraftBudget(n, d, 3) for n, d in ((3, 1), (4, 2), (6, 4), (8, 6), (12, 10), (15, 15))]),
        ("medusa", [DraftBudget(3, 1, 10), DraftBudget(4, 2, 10), DraftBudget(7, 4, 10)]),
    ],
)
def test_stored_values_are_possible(drafter: str, sizes: list[DraftBudget]) -> None:
    found = stored(demo(), drafter, sizes)
    assert found is not None
    assert len(found.kinds) == 13
    for kind in found.kinds.values():
        tokens = [kind.gains[size].tokens for size in sizes]
        assert all(1 <= n <= 1 + size.depth for n, size in zip(tokens, sizes, strict=True))
        assert all(b > 0.97 * a for a, b in pairwise(tokens)), "a longer draft gives no less"
        assert all(4 <= kind.gains[size].rows <= max(4, 1 + size.nodes) for size in sizes)


def test_a_size_that_is_not_stored_is_not_made_up() -> None:
    assert stored(demo(), "eagle3", [DraftBudget.chain(3), DraftBudget(24, 6, 4)]) is None
    assert stored(demo(), "block", [DraftBudget.chain(3)]) is None
    assert [format_budget(DraftBudget.chain(3)), format_budget(DraftBudget(24, 6, 4))] == ["3", "24x6x4"]


# --- what is timed ------------------------------------------------------------------------------------------------


def slow(clock: FakeTimer, **changes: int) -> Decoder:
    """Return a target whose pass takes 10 s, plus 1 s per row, plus 1 s per 100 tokens before it."""

    class Slow(Decoder):
        def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
            clock.now += 10 + rows.tokens.shape[1] + rows.lengths[0] / 100
            return super().forward(rows, cache, want)

    target = toy_target(context_length=2048, **changes)
    target.__class__ = Slow
    return target


def test_passes_are_timed_by_their_rows_after_the_same_text() -> None:
    clock = FakeTimer()
    probe = PassTimer(slow(clock), timer=clock)
    probe.feed(PREFIX)
    assert passes(probe, (1, 4, 8), repeats=3) == {1: 16.0, 4: 16.0, 8: 20.0}
    assert probe.length == PREFIX, "what was verified is not kept"


def test_a_prompts_chunks_cost_more_after_a_longer_text() -> None:
    machine = replace(MACHINE, prefill_growth=1e-6)
    assert machine.feed(PREFIX, 0) == pytest.approx(0.001 * PREFIX)
    assert machine.feed(100, 450) == pytest.approx(100 * (0.001 + 1e-6 * 400))
    assert MACHINE.feed(4, 0) == pytest.approx(0.010), "not cheaper than a pass of 4 rows"


def test_continuing_a_prompt_measures_prefill_speed_and_growth_of_passes() -> None:
    clock = FakeTimer()
    probe = PassTimer(slow(clock), timer=clock)
    probe.feed(PREFIX)
    prefill, growth = lengthen(probe, 2048)
    assert growth == pytest.approx(0.01)
    assert prefill == pytest.approx((10 + PREFILL_ROWS + (PREFIX + PREFILL_ROWS) / 100) / PREFILL_ROWS)


def test_bandwidth_is_the_best_of_a_few_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0, 30.0, 34.0, 40.0, 42.0])
    assert bandwidth(torch.device("cpu"), lambda: next(times), size=4000) == pytest.approx(4000.0)


def test_the_number_of_threads_stays_what_it_was() -> None:
    own, probe = torch.get_num_threads(), PassTimer(tiny_target())
    assert set(by_threads(probe, [1, 2])) == {1, 2}
    assert torch.get_num_threads() == own


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_reads_every_weight_except_the_embeddings(tied: bool) -> None:
    target = tiny_target(tied=tied)
    c = target.config
    attention = 2 * c.hidden * c.head_dim * (c.heads + c.kv_heads)
    matrices = c.layers * (attention + 3 * c.hidden * c.ffn) + c.vocab_size * c.hidden
    found = weight_bytes(target)
    assert found is not None
    # Apart from the matrices, there are only norms and small tables of the rotary embedding.
    assert 8 * matrices <= found < 8 * matrices * 1.05


def test_a_table_of_codes_is_not_read_if_the_head_is_separate(tmp_path: Path) -> None:
    found = []
    for tied in (True, False):
        write_gguf(tmp_path / f"{tied}.gguf", "qwen2", tied=tied, kind=GGMLQuantizationType.Q8_0)
        found.append(weight_bytes(load_model(tmp_path / f"{tied}.gguf", quantize="int8").target))
    assert found[0] == found[1]


# --- what follows -------------------------------------------------------------------------------------------------

MACHINE = Machine(
    passes={1: 0.010, 4: 0.010, 8: 0.016, 16: 0.032},
    growth=0.0,
    prefill=0.001,
    prefill_growth=0.0,
    host=0.002,
    bandwidth=20e9,
    weights=100_000_000,
    threads={1: 0.018, 2: 0.010, 4: 0.008},
)


def drafting(seconds: Mapping[DraftBudget, float], **gains: Mapping[DraftBudget, Gain]) -> Drafting:
    return Drafting(seconds, Acceptance({name: TextKind(96, each) for name, each in gains.items()}, "made up"))


THREE, SEVEN = DraftBudget.chain(3), DraftBudget.chain(7)
COSTS = {THREE: 0.003, SEVEN: 0.007}


def test_speeds_follow_from_what_things_cost() -> None:
    good = {THREE: Gain(2.5, 4.0), SEVEN: Gain(4.0, 8.0)}
    (f,) = forecast(MACHINE, drafting(COSTS, good=good))
    assert f.plain.seconds == pytest.approx(0.012)
    assert f.best.budget == THREE, "2.5 tokens in 15 ms beat 4 in 25"
    assert f.best.seconds == pytest.approx(0.015)
    assert f.decode_speedup == pytest.approx(2.5 / 0.015 * 0.012)
    assert f.first == pytest.approx(0.096 + 0.015)
    assert f.speedup == pytest.approx((0.096 + 96 * 0.012) / (0.096 + 96 * 0.015 / 2.5))


def test_unprofitable_drafts_are_skipped() -> None:
    bad, good = {THREE: Gain(1.1, 4.0), SEVEN: Gain(1.1, 8.0)}, {THREE: Gain(2.5, 4.0), SEVEN: Gain(5.0, 8.0)}
    both = forecast(MACHINE, drafting(COSTS, bad=bad, good=good))
    assert [f.best.budget for f in both] == [DraftBudget.chain(0), SEVEN]
    assert both[0].speedup == 1.0
    plain = 2 * (0.096 + 96 * 0.012)
    assert overall_speedup(both) == pytest.approx(plain / (plain / 2 + 0.096 + 96 * 0.025 / 5))


def test_a_longer_text_makes_every_pass_cost_more() -> None:
    machine = Machine(MACHINE.passes, 1e-5, 0.001, 1e-6, 0.0, 20e9, None, {})
    assert machine.verify(4, PREFIX + 1000) == pytest.approx(0.020)
    assert machine.verify(4, 10) == pytest.approx(0.010 - 190e-5)
    assert machine.verify(6, PREFIX) == pytest.approx(0.013)
    assert machine.min_pass_seconds is None


def test_it_says_why_a_draft_does_not_pay() -> None:
    gains = {THREE: Gain(1.1, 4.0), SEVEN: Gain(1.2, 8.0)}
    (line,) = advice.reasons(forecast(MACHINE, drafting(COSTS, writing=gains)), "eagle3")
    assert line == (
        "writing: eagle3 gives 1.10 tokens per round with drafts of 3, but drafting takes 0.25 plain rounds and a "
        "pass of 4.0 rows takes 1.00. The result is 0.88 times the plain speed, so nothing will be drafted"
    )
    assert advice.reasons(forecast(MACHINE, drafting(COSTS, x={t: Gain(3.0, 4.0) for t in COSTS})), "d") == []


def test_doctor_recommends_in_three_lines() -> None:
    good = drafting(COSTS, good={THREE: Gain(2.5, 4.0), SEVEN: Gain(4.0, 8.0)})
    found = {"good": overall_speedup(forecast(MACHINE, good))}
    lines = advice.settings(MACHINE, found, {"int8": 53_000_000, "int4": 40_000_000}, threads=2)
    assert [line.split(":")[0] for line in lines] == ["--drafter good", "--threads 4", "--quantize"]
    assert "53 MB with int8 or 40 MB with int4 instead of 100 MB" in lines[2]
    own = advice.settings(MACHINE, found, {"int8": 40_000_000, "int4": 40_000_000}, threads=4)
    assert own[1:] == [
        "--threads 4: the current setting",
        "--quantize int8: a pass reads 40 MB instead of 100 MB, using the codes of the file itself",
    ]
    bad = drafting(COSTS, bad={THREE: Gain(1.0, 4.0), SEVEN: Gain(1.0, 8.0)})
    lines = advice.settings(MACHINE, {"bad": overall_speedup(forecast(MACHINE, bad))}, {}, threads=4)
    assert lines == [
        "--drafter none: bad would not be faster here",
        "--threads 4: the current setting",
        "--quantize: keep the current setting",
    ]


def test_contradictory_measurements_are_reported() -> None:
    assert advice.warnings(MACHINE, threads=4) == []
    odd = replace(MACHINE, passes={1: 0.020, 4: 0.0201, 16: 0.015})
    (line,) = advice.warnings(odd, threads=4)
    assert "a pass of 4 rows took 20.1 ms, but a pass of 16 rows took 15.0 ms. Do not rely on the advice above" in line


def test_disturbed_threads_are_reported_and_do_not_decide_the_weights() -> None:
    """Another program slows down two threads to 48 ms for a pass of any size. A single thread takes 12 ms."""
    passes = {1: 0.0482, 2: 0.0439, 16: 0.0455}
    busy = replace(MACHINE, passes=passes, threads={1: 0.012, 2: 0.048})
    (line,) = advice.warnings(busy, threads=2)
    assert "4.0 times as fast with 1 thread as with 2" in line
    assert "another program occupied a core. Do not rely on the advice above" in line
    sizes = {"int8": 53_000_000, "int4": 40_000_000}
    assert "53 MB with int8" in advice.settings(busy, {}, sizes, threads=2)[2], "5 ms of reading are 42 % of 12 ms"
    assert advice.warnings(replace(busy, threads={1: 0.040, 2: 0.048}), threads=2) == []
    assert advice.warnings(replace(busy, threads={2: 0.048, 4: 0.012}), threads=2) == []


@pytest.mark.slow
@pytest.mark.model
def test_bytes_of_quantised_weights_equal_the_quantised_model() -> None:
    said = quantised_bytes(load_model("demo", dtype="bfloat16"))
    for mode in ("int8", "int4"):
        coded = load_model("demo", dtype="bfloat16", quantize=mode)
        assert said[mode] == pytest.approx(weight_bytes(coded.target), rel=0.002)
        assert quantised_bytes(coded) == {}


def test_doctor_reports_the_cost_of_passes_and_weights() -> None:
    first, second = advice.limits(MACHINE)
    assert first == "cost of a pass, relative to one row: 8 rows 1.60, 16 rows 3.20"
    assert "takes 10.0 ms" in second
    assert "100 MB of weights at 20.0 GB/s takes 5.0 ms of this (50%)" in second


def test_a_round_costs_its_pass_and_the_host_once_per_request() -> None:
    costs: Any = SimpleNamespace(verify=lambda rows, before: 10.0 * rows + before, host=0.5)
    model: Any = SimpleNamespace(target=None)
    prices = MeasuredPrices(model, costs, reply_logits=model)
    assert prices.round(3, [7, 8]) == 30 + 15 + 2 * 0.5


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.llm, "load", lambda *args, **options: toy_llm(context_length=700))
    monkeypatch.setattr("paceline.bench.doctor.machine._BUFFER", 1 << 20)
    monkeypatch.setattr(examination, "_OBSERVED", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_the_command_gives_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "toy", "--drafter", "suffix", "--json", "-q"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["machine"]["pass_ms"]) == ["1", "2", "4", "8", "16", "32"]
    (part,) = found["drafters"]
    assert part["acceptance"] == "observed here, over 6 short replies"
    assert set(part["draft_ms"]) == {"3x1x3", "4x2x3", "6x4x3", "8x6x3", "12x10x3", "15x15x3"}
    assert all(kind["ratio"] >= 1 for kind in part["kinds"].values())
    assert found["settings"]


@pytest.mark.usefixtures("toy")
def test_the_command_recommends_first_and_explains_when_asked() -> None:
    short = CliRunner().invoke(app, ["doctor", "toy"])
    assert short.exit_code == 0, short.output
    assert [line.split()[0].rstrip(":") for line in short.stdout.splitlines()[:3]] == [
        "--drafter",
        "--threads",
        "--quantize",
    ]
    assert "tokens per second" not in short.stdout
    assert "--details" in short.stderr
    result = CliRunner().invoke(app, ["doctor", "toy", "-q", "--details"])
    assert result.stdout.startswith("--drafter")
    for words in ("pass, by rows", "tokens per second", "writing", "Limits"):
        assert words in result.stdout


def test_a_drafter_that_is_none_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.llm, "load", None)
    result = CliRunner().invoke(app, ["doctor", "demo", "--drafter", "clairvoyant"])
    assert result.exit_code == 1
    assert "clairvoyant" in result.stderr
