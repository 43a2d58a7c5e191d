"""Number of prompt tokens to feed between two rounds."""

from __future__ import annotations

from collections import deque
from math import floor, inf

_MAX_STALL_SECONDS, _MAX_TURN_SECONDS = 0.03, 0.5
"""Seconds to spend on prompts between two rounds, and seconds to spend on prompts before looking for new requests when
no reply is running. If a round takes longer than `_MAX_STALL_SECONDS`, prompts may take as long as that round."""
_MIN_TOKENS_WHILE_RUNNING, _MIN_TOKENS_ALONE = 8, 32
"""Minimum number of tokens to feed with and without running replies. Smaller passes are less efficient: on CPUs, a
token costs 15 to 35% more in a pass of 16 rows than in a pass of 256 rows
(docs/notes/engine.md#reading-prompts-in-turns)."""


class ReadingPace:
    """Limits the prompt tokens fed per turn, so that a long prompt delays neither running replies nor new requests.

    On a fast machine, the limit is `quota` tokens. On a slow machine, these would take seconds, so the limit follows
    from the time per token of recent pieces. The limit never changes a text.

    Attributes:
        round_seconds: Duration of the latest round.
    """

    def __init__(self, quota: float) -> None:
        """`quota`: Maximum number of tokens between two rounds. `inf` removes all limits, including the limit on
        time."""
        self._quota = quota
        self._costs: deque[float] = deque(maxlen=4)
        """Seconds per token of recent pieces. The lowest one is used, since a piece may include the time to load a
        prefix."""
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
        seconds = max(_MAX_STALL_SECONDS, self.round_seconds) if running else _MAX_TURN_SECONDS
        tokens = max(
            _MIN_TOKENS_WHILE_RUNNING if running else _MIN_TOKENS_ALONE, floor(seconds / cost) if cost else inf
        )
        return min(tokens, self._quota) if running else tokens
