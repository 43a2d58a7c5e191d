"""Statistics of a reply: time, rounds and acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.types import Draft, Guarantee, Verdict

Phase = Literal["prefill", "draft", "verify", "commit"]
Timer = Callable[[], float]
"""A function that returns the current time in seconds, real or simulated."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a prompt and the cached text with the longest common prefix.

    Attributes:
        at: Length of the common prefix, in tokens.
        length: Length of the cached text, in tokens.
        ours: The first tokens of the prompt after the common prefix.
        theirs: The first tokens of the cached text after the common prefix.
    """

    at: int
    length: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


@dataclass(slots=True)
class Stats:
    """Counts and times of one reply.

    Attributes:
        seed: The seed of the reply.
        guarantee: See `Guarantee`.
        drafter: Name of the drafter. None for plain decoding.
        adapter: Name of the adapter. None for the model itself.
        rounds: Number of rounds. Each round has one verification pass.
        tokens: Number of tokens in the reply.
        drafted: Number of drafted tokens.
        accepted: Number of accepted draft tokens.
        accepted_at: At index i, the number of rounds that accepted at least i + 1 draft tokens.
        cached: Number of prompt tokens found in the prefix cache.
        from_disk: Number of cached tokens that were read from the prefix cache's folder on disk.
        diverged: First difference between the prompt and the most similar cached text. None if there is no difference,
            or if it cost only a few prefix-cache hits.
        predicted: Number of tokens in the prediction (predicted outputs).
        confirmed: Number of predicted tokens that the reply contains.
        draft_failures: Number of rows for which the drafter proposed nothing because it failed.
        seconds: Seconds spent in each phase.
        timer: The engine's clock.
    """

    seed: int
    guarantee: Guarantee
    drafter: str | None = None
    adapter: str | None = None
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    cached: int = 0
    from_disk: int = 0
    diverged: Divergence | None = None
    predicted: int = 0
    confirmed: int = 0
    draft_failures: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*get_args(Phase), "other"), 0.0))
    timer: Timer = field(default=time.perf_counter, repr=False, compare=False)
    _began: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._began = self.timer()

    @property
    def tokens_per_round(self) -> float:
        """Mean acceptance length: tokens of the reply per round, including the token that the target adds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """Count one round."""
        self.rounds += 1
        self.tokens += len(verdict.tokens)
        self.drafted += len(draft.tokens)
        self.accepted += len(verdict.path)
        self.accepted_at += [0] * (len(verdict.path) - len(self.accepted_at))
        for depth in range(len(verdict.path)):
            self.accepted_at[depth] += 1

    def close(self) -> None:
        """End the reply. The time outside all phases is recorded as "other", so the phases add up to the wall time."""
        named = sum(seconds for phase, seconds in self.seconds.items() if phase != "other")
        self.seconds["other"] = self.timer() - self._began - named

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_round": round(self.tokens_per_round, 4),
            "accepted_at": list(self.accepted_at),
            "cached": self.cached,
            "seed": self.seed,
            "guarantee": self.guarantee,
            "drafter": self.drafter,
            **({"adapter": self.adapter} if self.adapter else {}),
            **({"predicted": self.predicted, "confirmed": self.confirmed} if self.predicted else {}),
            **({"draft_failures": self.draft_failures} if self.draft_failures else {}),
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }


class Clock:
    """A stopwatch that measures consecutive phases."""

    def __init__(self, timer: Timer) -> None:
        self.laps: dict[Phase, float] = {}
        self._timer, self._mark = timer, timer()

    def lap(self, phase: Phase) -> None:
        """Add the seconds since the previous lap to `phase`."""
        now = self._timer()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._mark
        self._mark = now
