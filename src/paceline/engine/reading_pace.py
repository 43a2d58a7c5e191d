"""Number of prompt tokens to feed between two rounds."""

from __future__ import annotations

from collections import deque
from math import floor, inf

_STALL, _TURN = 0.03, 0.5
"""Seconds of reading between two rounds, and seconds of reading before new requests are considered if no reply is
running. A round that takes longer than `_STALL` allows reading for as long as itself."""
_MIN_SHARED, _MIN_ALONE = 8, 32
"""Minimum number of tokens to feed with and without running replies. Smaller passes read less efficiently: on CPUs, a
token in a pass of 16 rows costs 15 to 35 % more than in one of 256 (docs/notes/engine.md#reading-prompts-in-turns)."""


class ReadingPace:
    """Limits the prompt tokens per turn, so that neither running replies nor new requests wait long for a prompt.

    On a fast machine, `quota` tokens are the limit. On a slow one, they would take seconds, so the time that recent
    pieces took is the limit. The number of tokens changes no text.

    Attributes:
        round_seconds: Duration of the latest round.
    """

    def __init__(self, quota: float) -> None:
        """`quota`: Maximum number of tokens between two rounds. `inf` for no limit, also of time."""
        self._quota = quota
        self._costs: deque[float] = deque(maxlen=4)
        """Seconds per token of recent pieces. The lowest counts, since a piece may include the loading of a prefix."""
        self.round_seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the duration of a piece of a prompt."""
        if tokens:
            self._costs.append(seconds / tokens)

    def limit(self, running: bool) -> float:
        """Return the number of tokens to feed now, a whole number or `inf`.

        `running`: True if replies wait for their next round.
        """
        if self._quota == inf:
            return inf
        cost = min(self._costs, default=inf)
        seconds = max(_STALL, self.round_seconds) if running else _TURN
        tokens = max(_MIN_SHARED if running else _MIN_ALONE, floor(seconds / cost) if cost else inf)
        return min(tokens, self._quota) if running else tokens
