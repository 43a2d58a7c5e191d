"""Counts of a request's replies, from which each API makes its own usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from paceline.engine.stats import Stats


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts over all replies to a request.

    Attributes:
        prompt: Tokens of the prompts.
        written: Tokens of the replies.
        stats: Statistics of each reply.
        cached: Tokens of the prompts that came from the prefix cache.
        drafter: The drafter's name. None for plain decoding.
        queued: Seconds from submission until a reply had a slot.
        first: Seconds from submission until a reply had its first token.
        total: Seconds from submission until all replies had ended.
        read: Tokens of the prompts read so far.
    """

    prompt: int
    written: int
    stats: Sequence[Stats]
    cached: int = 0
    drafter: str | None = None
    queued: float = 0.0
    first: float = 0.0
    total: float = 0.0
    read: int = 0

    def openai(self, reasoning: int = 0) -> dict[str, Any]:
        """Return OpenAI's token counts, and the statistics of speculation. `reasoning`: tokens of the reasoning."""
        details = {**({"reasoning_tokens": reasoning} if reasoning else {}), **self._predicted()}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": details} if details else {}),
            "speculation": self.speculation(),
        }

    def _predicted(self) -> dict[str, int]:
        """Return the counts of predicted tokens that the replies accepted and rejected; {} without a prediction."""
        predicted, accepted = sum(s.predicted for s in self.stats), sum(s.confirmed for s in self.stats)
        if not predicted:
            return {}
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}

    @property
    def rounds(self) -> int:
        """Rounds of all replies."""
        return sum(each.rounds for each in self.stats)

    @property
    def _accepted_at(self) -> list[int]:
        return [sum(counts) for counts in zip_longest(*(each.accepted_at for each in self.stats), fillvalue=0)]

    def speculation(self) -> dict[str, Any]:
        """Return the statistics of speculation."""
        return {
            "rounds": self.rounds,
            "drafted": sum(each.drafted for each in self.stats),
            "accepted": sum(each.accepted for each in self.stats),
            "accepted_at": self._accepted_at,
            "drafter": self.drafter,
            "tokens_per_round": round(self.written / self.rounds, 4) if self.rounds else 0.0,
        }

    def prompt_progress(self) -> dict[str, int]:
        """Return how much of the prompts has been read, as llama.cpp's server does for `return_progress`."""
        milliseconds = round(1000 * self.total)
        return {"total": self.prompt, "cache": self.cached, "processed": self.read, "time_ms": milliseconds}

    def vllm(self) -> dict[str, Any]:
        """Return the same statistics as vLLM's `metrics` has them (`--per-request-spec-decode-metrics`).

        `acceptance_histogram[i]`: rounds in which i drafted tokens were accepted.
        """
        drafted, accepted = sum(each.drafted for each in self.stats), sum(each.accepted for each in self.stats)
        histogram = [more - deeper for more, deeper in pairwise([self.rounds, *self._accepted_at, 0])]
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / self.rounds if self.rounds else 0.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": histogram,
                "num_spec_steps": self.rounds,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
            }
        }
