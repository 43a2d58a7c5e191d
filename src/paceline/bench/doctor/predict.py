"""Forecasting the speed for each kind of text from this machine's timings and a drafter's acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.doctor.acceptance import Acceptance, Gain, TextKind
from paceline.bench.doctor.machine import Machine
from paceline.types import DraftBudget

TOKENS = 96
"""Reply length that end-to-end figures assume, in tokens."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Measurements of a drafter.

    Attributes:
        seconds: Draft budget -> time of a draft in seconds.
        acceptance: Its acceptance.
    """

    seconds: Mapping[DraftBudget, float]
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a round at one draft budget.

    Attributes:
        budget: Draft budget.
        gain: Tokens and rows of the round.
        drafting: Seconds of drafting.
        seconds: Seconds of the whole round.
    """

    budget: DraftBudget
    gain: Gain
    drafting: float
    seconds: float

    @property
    def speed(self) -> float:
        """Decoded tokens per second, without prefill."""
        return self.gain.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for a kind of text.

    Attributes:
        kind: The kind of text.
        plain: Prediction without drafts.
        best: Prediction at the best draft budget, which may be 0.
        best_draft: Prediction at the best draft budget > 0.
        prefill: Seconds of prefilling the prompt.
    """

    kind: str
    plain: Prediction
    best: Prediction
    best_draft: Prediction
    prefill: float

    @property
    def decode_speedup(self) -> float:
        """Decoding speed relative to plain decoding."""
        return self.best.speed / self.plain.speed

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.prefill + self.best.seconds

    def speed(self, choice: Prediction) -> float:
        """Return the end-to-end speed of a reply of `TOKENS` tokens, in tokens per second."""
        return TOKENS / (self.prefill + TOKENS / choice.speed)

    @property
    def speedup(self) -> float:
        """End-to-end speed relative to plain decoding."""
        return self.speed(self.best) / self.speed(self.plain)


def forecast(machine: Machine, drafting: Drafting) -> list[Forecast]:
    """Return a forecast for every kind of text for which the acceptance is known."""
    return [_forecast(machine, drafting, name, kind) for name, kind in drafting.acceptance.kinds.items()]


def _forecast(machine: Machine, drafting: Drafting, name: str, kind: TextKind) -> Forecast:
    def predict(budget: DraftBudget, gain: Gain, seconds: float) -> Prediction:
        return Prediction(budget, gain, seconds, machine.verify(gain.rows, before) + seconds + machine.host)

    before = kind.prompt + TOKENS / 2
    plain = predict(DraftBudget.chain(0), Gain(1.0, 1.0), 0.0)
    choices = [predict(budget, kind.gains[budget], seconds) for budget, seconds in drafting.seconds.items()]
    best_draft = max(choices, key=lambda choice: choice.speed)
    best = max((plain, best_draft), key=lambda choice: choice.speed)
    return Forecast(name, plain, best, best_draft, kind.prompt * machine.prefill)


def overall_speedup(forecasts: Sequence[Forecast]) -> float:
    """Return the overall speed relative to plain decoding. All kinds of text have the same weight."""
    plain = sum(1 / f.speed(f.plain) for f in forecasts)
    return plain / sum(1 / f.speed(f.best) for f in forecasts)
