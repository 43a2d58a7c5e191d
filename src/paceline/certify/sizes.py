"""Amounts of work, which determine the cost of a certificate before it starts."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLED_TOKENS = 4
"""Tokens of a sampled reply."""


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Amounts of work of a certificate.

    Attributes:
        prompts: Prompts for greedy replies.
        tokens: Maximum length of a greedy reply, in tokens.
        contexts: Contexts of the sampled part.
        seeds: Samples per context and setting.
        texts: Long sampled texts of each side.
        questions: Questions of each kind.
        timed: Prompts of the speed part.
        seconds: Time limit for the whole test, in seconds.
    """

    prompts: int
    tokens: int
    contexts: int
    seeds: int
    texts: int
    questions: int
    timed: int
    seconds: float

    def requests(self) -> int:
        """Return the number of requests. Differences cause further requests, which are not counted."""
        sampled = 2 * 3 * self.contexts * self.seeds
        return 4 * self.prompts + sampled + 4 * self.texts + 110 + 64 + 4 * self.questions + 4 * self.timed

    def most_tokens(self) -> int:
        """Return the maximum number of tokens that these requests generate."""
        sampled = 2 * 3 * self.contexts * self.seeds * SAMPLED_TOKENS
        greedy = (4 * self.prompts + 2 * self.texts + 64 + 4 * self.timed) * self.tokens
        return greedy + sampled + 110 * 48 + 4 * self.questions * 96


QUICK = WorkSizes(26, 48, 3, 80, 24, 10, 4, 120)
STANDARD = WorkSizes(65, 96, 6, 200, 60, 40, 10, 900)
FULL = WorkSizes(200, 256, 12, 600, 200, 100, 20, 3600)
