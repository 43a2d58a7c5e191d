"""Forecasts: how fast each kind of text will be written, from this machine's timings and a drafter's acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.doctor.acceptance import Acceptance, Gain, TextKind
from paceline.bench.doctor.machine import Machine
from paceline.types import DraftBudget

TOKENS = 96
"""Reply length of end-to-end figures."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter here: seconds of a draft by size, and its acceptance."""

    seconds: Mapping[DraftBudget, float]
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class Prediction:
    """A round at one draft size: its gain, its seconds of drafting, its seconds in all."""

    size: DraftBudget
    gain: Gain
    drafting: float
    seconds: float

    @property
    def speed(self) -> float:
        """Decoded tokens per second, prefill left out."""
        return self.gain.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for a kind of text. `plain`: without drafts. `best`: at the best draft size, which may be empty.
    `nearest`: at the best size that does draft. `prefill`: seconds of prefilling the prompt."""

    kind: str
    plain: Prediction
    best: Prediction
    nearest: Prediction
    prefill: float

    @property
    def decode_ratio(self) -> float:
        """Decoding speed over plain decoding's."""
        return self.best.speed / self.plain.speed

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.prefill + self.best.seconds

    def speed(self, choice: Prediction) -> float:
        """Return the end-to-end tokens per second of a reply of `TOKENS`."""
        return TOKENS / (self.prefill + TOKENS / choice.speed)

    @property
    def ratio(self) -> float:
        """End-to-end speed over plain decoding's."""
        return self.speed(self.best) / self.speed(self.plain)


def forecast(machine: Machine, drafting: Drafting) -> list[Forecast]:
    """Return a forecast for every kind of text with known acceptance."""
    return [_forecast(machine, drafting, name, kind) for name, kind in drafting.acceptance.kinds.items()]


def _forecast(machine: Machine, drafting: Drafting, name: str, kind: TextKind) -> Forecast:
    def predict(size: DraftBudget, gain: Gain, seconds: float) -> Prediction:
        return Prediction(size, gain, seconds, machine.verify(gain.rows, before) + seconds + machine.host)

    before = kind.prompt + TOKENS / 2
    plain = predict(DraftBudget.chain(0), Gain(1.0, 1.0), 0.0)
    choices = [predict(size, kind.gains[size], seconds) for size, seconds in drafting.seconds.items()]
    nearest = max(choices, key=lambda choice: choice.speed)
    best = max((plain, nearest), key=lambda choice: choice.speed)
    return Forecast(name, plain, best, nearest, kind.prompt * machine.prefill)


def overall(forecasts: Sequence[Forecast]) -> float:
    """Return all tokens over all seconds, kinds weighted alike, over plain decoding's."""
    plain = sum(1 / f.speed(f.plain) for f in forecasts)
    return plain / sum(1 / f.speed(f.best) for f in forecasts)
