"""The cost of finding the draft length over whole replies: from prices and acceptance rates to speed relative to plain
decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean

import pytest

from paceline.types import Draft, DraftBudget, Verdict
from tests.support.controlled import Driven
from tests.support.cover import some

_PREFILL, _PLAIN = 0.15, 0.045
"""Plain rounds that a token of a prompt takes, and seconds of a plain round."""


@dataclass(frozen=True)
class Prices:
    """Costs of a drafter, in plain rounds: an additional row, a level of drafting, and a token of catching up."""

    most: DraftBudget
    row: float
    level: float
    token: float


DRAFTERS = {
    "draft model": Prices(DraftBudget(7, 7, 3), 0.1, 0.26, 0.06),
    "smaller model": Prices(DraftBudget.chain(8), 0.05, 0.15, 0.03),
    "head": Prices(DraftBudget.chain(3), 0.05, 0.2, 0.015),
    "lookup": Prices(DraftBudget.chain(12), 0.08, 0.003, 0.0),
}


class Machine:
    """Successive replies with one controller. Times have jitter and occasional disturbances."""

    def __init__(self, prices: Prices, seed: int) -> None:
        self._prices, self._dice = prices, random.Random(seed)
        self._controller = Driven(prices.most, free=not prices.token)

    def speed(self, prompt: int, length: int, right: float) -> float:
        """Return a reply's end-to-end speed relative to plain decoding. `right` is the acceptance rate per token."""
        unread, written, seconds = prompt, 0, prompt * _PREFILL
        while written < length:
            size = self._controller.choose(1, unread, length - written, written, int(not written))
            budget = size.within(min(size.depth, length - written - 1))
            drafted, kept = self._draft(budget, right)
            drafting = self._prices.level * drafted + (self._prices.token * unread if drafted else 0.0)
            verifying = 1.0 + self._prices.row * drafted
            self._learn(budget, drafted, kept, drafting, verifying, length - written)
            unread, written = kept + 1 + (0 if drafted else unread), written + kept + 1
            seconds += drafting + verifying
        return (prompt * _PREFILL + length) / seconds

    def _draft(self, budget: DraftBudget, right: float) -> tuple[int, int]:
        """Return the tokens drafted and accepted."""
        kept = 0
        while kept < budget.depth and self._dice.random() < right:
            kept += 1
        return budget.depth, kept

    def _learn(
        self, budget: DraftBudget, drafted: int, kept: int, drafting: float, verifying: float, left: int
    ) -> None:
        verdict = Verdict(tuple(range(1, kept + 1)), (0,) * (kept + 1), "length" if kept + 1 >= left else None)
        noise = [1 + 0.05 * self._dice.random() + 2.0 * (self._dice.random() < 0.02) for _ in range(2)]
        seconds = drafting * noise[0] * _PLAIN, verifying * noise[1] * _PLAIN
        self._controller.take([budget], [Draft.chain((0,) * drafted)], [verdict], *seconds, 1, 1 + drafted)


class Knowing(Machine):
    """Replies with a drafter that knows its tokens' probabilities, and stops when the next token is not worthwhile."""

    def _draft(self, budget: DraftBudget, right: float) -> tuple[int, int]:
        """`right` is the share of nearly certain tokens. The others are accepted a third of the time."""
        least = self._controller.last.price + self._controller.last.pace * self._prices.level * _PLAIN
        odds, drafted, kept = 1.0, 0, 0
        while drafted < budget.depth and (not drafted or odds >= least):
            chance = 0.97 if self._dice.random() < right else 0.35
            kept += int(kept == drafted and self._dice.random() < chance)
            odds, drafted = odds * chance, drafted + 1
        return drafted, kept


def best(prices: Prices, prompt: int, length: int, right: float) -> float:
    """Return the speed of the best fixed chain, or of none."""
    rounds = [
        (1 + n * (prices.row + prices.level)) / sum(right**depth for depth in range(n + 1))
        for n in range(1, prices.most.depth + 1)
    ]
    fed = prompt * _PREFILL
    return (fed + length) / (fed + min(length, min(rounds) * length + prices.token * prompt))


@pytest.mark.parametrize(
    ("name", "least"), [("draft model", 0.93), ("smaller model", 0.95), ("head", 0.96), ("lookup", 0.97)]
)
def test_the_first_reply_on_text_that_cannot_be_guessed(name: str, least: float) -> None:
    found = [Machine(DRAFTERS[name], seed).speed(60, 96, 0.0) for seed in range(6)]
    assert fmean(found) > least
    assert min(Machine(DRAFTERS[name], seed).speed(1000, 96, 0.0) for seed in range(3)) > 0.98, "a long prompt to read"


@pytest.mark.parametrize("name", ["draft model", "smaller model", "head"])
def test_a_first_short_reply_does_not_wait_until_its_prompt_is_read(name: str) -> None:
    assert min(Machine(DRAFTERS[name], seed).speed(60, 20, right) for seed in range(3) for right in (0.0, 0.6)) > 0.97


@pytest.mark.parametrize("name", DRAFTERS)
def test_many_replies_that_cannot_be_guessed_cost_two_percent_at_most(name: str) -> None:
    machine = Machine(DRAFTERS[name], 0)
    machine.speed(60, 96, 0.02)
    assert fmean(machine.speed(60, 96, 0.02) for _ in range(40)) > 0.98


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_text_is_judged_by_itself(name: str) -> None:
    """Predictable and unpredictable texts alternate."""
    good, hostile = [], []
    for seed in range(3):
        machine = Machine(DRAFTERS[name], seed)
        speeds = [machine.speed(60, 96, 0.05 if turn % 2 else 0.85) for turn in range(16)]
        good += speeds[4::2]
        hostile += speeds[5::2]
    assert fmean(good) > 1 + 0.5 * (best(DRAFTERS[name], 60, 96, 0.85) - 1)
    assert fmean(hostile) > 0.93


def test_long_chains_of_one_text_do_not_raise_the_cost_estimate_of_another() -> None:
    """Chains end early in an unpredictable text, so the cost of long chains in other texts is irrelevant."""
    easy, hard = [], []
    for seed in range(4):
        machine = Knowing(DRAFTERS["draft model"], seed)
        speeds = [machine.speed(60, 96, (0.98, 0.6)[turn % 2]) for turn in range(16)]
        easy += speeds[4::2]
        hard += speeds[5::2]
    assert fmean(easy) > 1.55
    assert fmean(hard) > 1.19


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_gains_is_used_in_a_long_reply_to_a_long_prompt(name: str) -> None:
    machine = Machine(DRAFTERS[name], 1)
    machine.speed(1000, 600, 0.9)
    gain = fmean(machine.speed(1000, 600, 0.9) for _ in range(6)) - 1
    assert gain > 0.6 * (best(DRAFTERS[name], 1000, 600, 0.9) - 1)


@pytest.mark.parametrize("name", DRAFTERS)
@some("right", [0.0, 0.3, 0.65, 0.8, 0.9], fast=["0.8"])
def test_thousands_of_rounds_never_lose_and_win_what_can_be_won(name: str, right: float) -> None:
    found = [Machine(DRAFTERS[name], seed).speed(60, 3000, right) for seed in range(3)]
    assert min(found) > 0.98
    possible = best(DRAFTERS[name], 60, 3000, right)
    if possible > 1.3:
        assert sorted(found)[1] > 0.85 * possible
