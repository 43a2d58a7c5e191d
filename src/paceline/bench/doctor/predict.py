"""From what things cost here and what drafts give: how fast each kind of text will be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.doctor.acceptance import Acceptance, TextKind
from paceline.bench.doctor.machine import Machine
from paceline.bench.doctor.watch import Gain
from paceline.types import DraftBudget

TOKENS = 96
"""Length of the replies that end-to-end figures are for."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter here: seconds of a draft by size, and what drafts give by kind of text."""

    name: str
    seconds: Mapping[DraftBudget, float]
    acceptance: Acceptance

    @property
    def sizes(self) -> list[DraftBudget]:
        return list(self.seconds)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A round with drafts of one size: what it gives, and in how many seconds of drafting, and in all."""

    size: DraftBudget
    gain: Gain
    drafting: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens in a second, once the prompt is read."""
        return self.gain.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    """A kind of text. `plain`: without drafts. `best`: with drafts of the best size, the empty one among them.
    `nearest`: the best that does draft. `prompt`: seconds of reading it."""

    kind: str
    plain: Prediction
    best: Prediction
    nearest: Prediction
    prompt: float

    @property
    def decode_ratio(self) -> float:
        """Of tokens per second after the prompt, to plain decoding's."""
        return self.best.speed / self.plain.speed

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.prompt + self.best.seconds

    def speed(self, choice: Prediction) -> float:
        """Tokens in a second of a reply of `TOKENS`, from text to text."""
        return TOKENS / (self.prompt + TOKENS / choice.speed)

    @property
    def ratio(self) -> float:
        """The same, to plain decoding's."""
        return self.speed(self.best) / self.speed(self.plain)


def forecast(machine: Machine, drafting: Drafting) -> list[Forecast]:
    """Of every kind of text that the drafter's acceptance is known for."""
    return [_forecast(machine, drafting, name, kind) for name, kind in drafting.acceptance.kinds.items()]


def _forecast(machine: Machine, drafting: Drafting, name: str, kind: TextKind) -> Forecast:
    before = kind.prompt + TOKENS / 2
    plain = Prediction(DraftBudget.chain(0), Gain(1.0, 1.0), 0.0, machine.verify(1, before) + machine.host)
    choices = []
    for size in drafting.sizes:
        gain, seconds = kind.gains[size], drafting.seconds[size]
        choices.append(Prediction(size, gain, seconds, machine.verify(gain.rows, before) + seconds + machine.host))
    nearest = max(choices, key=lambda choice: choice.speed)
    best = max((plain, nearest), key=lambda choice: choice.speed)
    return Forecast(name, plain, best, nearest, kind.prompt * machine.prefill)


def overall(forecasts: Sequence[Forecast]) -> float:
    """All tokens by all seconds, kinds alike, to plain decoding's."""
    plain = sum(1 / f.speed(f.plain) for f in forecasts)
    return plain / sum(1 / f.speed(f.best) for f in forecasts)
