"""The checks find planted faults, and pass clean endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.certify.certificate import BITWISE, DISTRIBUTION, LOSSY, NEAR_TIES, Certificate
from paceline.certify.compare import Sides
from paceline.certify.run import examine
from paceline.certify.side import Side
from paceline.certify.sizes import WorkSizes
from tests.support.cover import some
from tests.support.fake_endpoint import FAULTS, FakeEndpoint

TEXTS = WorkSizes(13, 40, 1, 1, 1, 1, 1, 1000)
"""Enough work for faults that change greedy texts or features."""
SAMPLES = WorkSizes(5, 16, 2, 100, 24, 1, 1, 1000)
"""Enough work for faults of sampling."""
LARGE = WorkSizes(39, 160, 4, 300, 24, 8, 1, 1000)
"""Work that faults of long replies, long prompts, or few positions need."""

SAMPLED = {"temperature_twice", "top_p_ignored", "drop_residual", "late_sampling", "late_distribution"}
HIDDEN = {"late", "long_prompt", "greedy_sampling"}
"""Faults that need the large amount of work."""
FAST = [
    *("one_percent", "off_by_one_commit", "accepts_runner_up", "temperature_twice", "top_p_ignored"),
    *("late_sampling", "late_distribution"),
    *("stop_inside_block", "draft_logprobs", "lost_chunk", "counts_drafts", "row_swap"),
]
"""Faults in the fast tier, one of each kind."""
PARTS = {
    "stop_inside_block": ("features", "stop strings"),
    "stop_across_tokens": ("features", "stop strings"),
    "server_error": ("features", "stop strings"),
    "over_max_tokens": ("features", "max_tokens"),
    "under_max_tokens": ("features", "max_tokens"),
    "wrong_finish": ("features", "end of the reply"),
    "draft_logprobs": ("features", "logprobs"),
    "shifted_top": ("features", "top_logprobs"),
    "row_swap": ("load", "4 at a time"),
    "lost_chunk": ("features", "streams"),
    "twice_chunk": ("features", "streams"),
    "counts_drafts": ("features", "usage"),
    "second_choice": ("features", "n > 1"),
    "no_penalties": ("features", "penalties"),
    "no_bias": ("features", "logit_bias"),
    "no_schema": ("features", "JSON schema"),
    "broken_call": ("features", "tool calls"),
    "stale_prefix": ("features", "prefix reuse"),
    "broken_characters": ("features", "characters"),
    "one_percent": ("greedy", "texts"),
    "always_accept": ("greedy", "texts"),
    "stale_cache": ("greedy", "texts"),
    "off_by_one_commit": ("greedy", "texts"),
    "accepts_runner_up": ("greedy", "texts"),
    "repeated_token": ("greedy", "texts"),
    "late": ("greedy", "texts"),
    "long_prompt": ("greedy", "texts"),
    "temperature_twice": ("sampled", "temperature 0.6"),
    "top_p_ignored": ("sampled", "top_p 0.7"),
    "late_sampling": ("sampled", "long texts"),
    "late_distribution": ("sampled", "long texts"),
}
"""Fault -> a check that must fail, if a specific check must."""


def certified(sizes: WorkSizes, **endpoint: Any) -> Certificate:
    server = FakeEndpoint(**endpoint)
    sides = Sides(Side("speculative", server), Side("plain", server, extra={"speculation": "off"}))
    return examine(sides, sizes, {})


def failures(certificate: Certificate) -> set[tuple[str, str]]:
    return {(check.part, check.name) for check in certificate.checks() if check.state == "fail"}


@some("fault", sorted(FAULTS.keys() - HIDDEN), fast=sorted(FAST))
def test_a_planted_fault_is_found(fault: str) -> None:
    certificate = certified(SAMPLES if fault in SAMPLED else TEXTS, fault=fault)
    assert certificate.verdict()[0] == LOSSY
    found = failures(certificate)
    assert PARTS.get(fault) in (found | {None}), found
    assert certificate.exit_code == 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(HIDDEN))
def test_more_work_finds_what_little_work_does_not(fault: str) -> None:
    certificate = certified(LARGE, fault=fault)
    assert certificate.verdict()[0] == LOSSY
    assert PARTS.get(fault) in (failures(certificate) | {None})


@pytest.mark.parametrize(
    ("endpoint", "verdict"),
    [
        ({}, BITWISE),
        ({"own_noise": True}, BITWISE),
        ({"rounding": 0.02}, NEAR_TIES),
        ({"noise": 0.05}, DISTRIBUTION),
        ({"refused": ("logprobs", "stop", "n", "tools", "response_format", "logit_bias", "seed")}, BITWISE),
    ],
    ids=["same random numbers", "other random numbers", "rounding", "noise", "few fields"],
)
def test_a_clean_endpoint_passes(endpoint: dict[str, Any], verdict: str) -> None:
    certificate = certified(SAMPLES if verdict == DISTRIBUTION else TEXTS, **endpoint)
    assert not failures(certificate)
    assert certificate.verdict()[0] == verdict
    assert certificate.exit_code == 0


@pytest.mark.parametrize(("fault", "found"), [("late_sampling", True), ("late_distribution", False)])
def test_without_echo_each_side_scores_its_own_texts(fault: str, found: bool) -> None:
    """This check misses a side that reports log-probabilities of its own wrong distribution."""
    certificate = certified(SAMPLES, fault=fault, refused=("echo",))
    assert certificate.scored is not None
    assert not certificate.scored.by_plain
    assert certificate.scored.texts == 24
    assert failures(certificate) == ({("sampled", "long texts")} if found else set())


@pytest.mark.parametrize(("endpoint", "is_real"), [({"fault": "stale_cache"}, True), ({"rounding": 0.02}, False)])
def test_likely_tokens_need_no_alternatives(endpoint: dict[str, Any], is_real: bool) -> None:
    """A token with more than half of the probability is not a near tie, even if the server reports no alternatives."""
    server = FakeEndpoint(**endpoint)

    def without_top(method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        return server(method, path, {name: value for name, value in (body or {}).items() if name != "top_logprobs"})

    plain = Side("plain", without_top, extra={"speculation": "off"})
    greedy = examine(Sides(Side("speculative", without_top), plain), TEXTS, {}).greedy
    assert (greedy.real > 0) == is_real
    assert greedy.near_ties == 0
    assert greedy.unknown > 0


@pytest.mark.parametrize(
    ("endpoint", "verdict", "reason"),
    [
        ({}, BITWISE, "identical"),
        ({"stuck": True}, "inconclusive", "the plain side drafted"),
        ({"fault": "always_accept", "stuck": True}, "inconclusive", "the plain side drafted"),
    ],
)
def test_a_switch_that_does_nothing_is_noticed(endpoint: dict[str, Any], verdict: str, reason: str) -> None:
    certificate = certified(TEXTS, counts=True, **endpoint)
    assert certificate.verdict()[0] == verdict
    assert reason in certificate.verdict()[1]


def test_an_endpoint_that_drafts_nothing_is_not_certified() -> None:
    sides = Sides(*(Side(name, FakeEndpoint(counts=True), extra={"speculation": "off"}) for name in ("a", "b")))
    certificate = examine(sides, TEXTS, {})
    assert certificate.verdict() == (
        "inconclusive",
        "the endpoint reports no drafted tokens, so there was no speculation to test",
    )


def test_refused_fields_are_not_offered() -> None:
    certificate = certified(TEXTS, refused=("stop", "tools"))
    skipped = {check.name for check in certificate.checks() if check.state == "skip"}
    assert skipped == {"stop strings", "tool calls"}


def test_fields_that_break_both_sides_of_the_server_are_not_offered() -> None:
    certificate = certified(TEXTS, rounding=0.02, broken=("logprobs", "stop"))
    states = {check.name: check.state for check in certificate.checks()}
    assert {states[name] for name in ("stop strings", "logprobs", "top_logprobs", "long texts")} == {"skip"}
    assert certificate.greedy.unknown > 0
    assert certificate.verdict()[0] == "inconclusive"


def test_prompts_that_are_too_long_are_left_out() -> None:
    certificate = certified(TEXTS, longest=1500)
    assert (certificate.greedy.prompts, certificate.greedy.refused) == (12, 1)
    assert certificate.verdict()[0] == BITWISE


@pytest.mark.slow
@pytest.mark.parametrize("noise", [{}, {"own_noise": True}, {"rounding": 0.03}, {"noise": 0.05, "own_noise": True}])
def test_fifty_runs_have_no_false_alarm(noise: dict[str, Any]) -> None:
    """There are four kinds of clean endpoints, with 200 runs in total."""
    alarms = {seed: failures(certified(SAMPLES, seed=seed, **noise)) for seed in range(50)}
    assert {seed: alarm for seed, alarm in alarms.items() if alarm} == {}


def test_the_smallest_example_is_short_and_still_differs() -> None:
    server = FakeEndpoint("stale_cache")
    smallest = certified(TEXTS, fault="stale_cache").smallest
    assert smallest is not None
    assert len(smallest.prompt.split()) <= 3
    assert smallest.fields["max_tokens"] < 20
    on, off = Side("speculative", server), Side("plain", server, extra={"speculation": "off"})
    assert on.ask(smallest.prompt, **smallest.fields).text != off.ask(smallest.prompt, **smallest.fields).text
    assert smallest.gap is not None
    assert smallest.gap > 0.25


def test_checks_without_time_are_reported() -> None:
    certificate = certified(WorkSizes(13, 40, 1, 1, 1, 1, 1, 0.0))
    verdict, reason = certificate.verdict()
    assert verdict == "inconclusive"
    assert "time" in reason
    assert certificate.exit_code == 4
    assert sum(check.detail == "there was no time left" for check in certificate.checks()) == 13
