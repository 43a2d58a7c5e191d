"""What a reply cost and what speculation gave."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.types import Draft, Guarantee, Verdict

Phase = Literal["prefill", "draft", "verify", "commit"]


@dataclass(slots=True)
class Stats:
    """Counts and times of one reply.

    `rounds`: verify passes. `drafted`, `accepted`: draft tokens proposed and kept. `accepted_at[i]`: rounds whose
    draft was kept to depth i + 1 at least. `cached`: tokens of the prompt that were known already. `seed`: the one
    used. `guarantee`: what the text keeps of plain decoding's, on this machine and under this rule. `drafter`: the name
    of the one that drafted, None for plain decoding. `seconds`: where the time went.
    """

    seed: int
    guarantee: Guarantee
    drafter: str | None = None
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    cached: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0, "other": 0.0}
    )
    _began: float = field(default_factory=time.perf_counter, init=False, repr=False, compare=False)

    @property
    def tokens_per_round(self) -> float:
        """Tokens of the reply per verify pass, the target's own one included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """The part of the drafted tokens that was kept."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """One round more."""
        self.rounds += 1
        self.tokens += len(verdict.tokens)
        self.drafted += len(draft.tokens)
        self.accepted += len(verdict.path)
        self.accepted_at += [0] * (len(verdict.path) - len(self.accepted_at))
        for depth in range(len(verdict.path)):
            self.accepted_at[depth] += 1

    def close(self) -> None:
        """The reply is over: whatever no phase accounts for is "other", so that the parts sum to the wall time."""
        named = sum(seconds for phase, seconds in self.seconds.items() if phase != "other")
        self.seconds["other"] = time.perf_counter() - self._began - named

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }


class Clock:
    """Splits a stretch of time into consecutive phases."""

    def __init__(self) -> None:
        self.laps: dict[Phase, float] = {}
        self._mark = time.perf_counter()

    def lap(self, phase: Phase) -> None:
        """Everything since the last lap belongs to `phase`."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._mark
        self._mark = now
