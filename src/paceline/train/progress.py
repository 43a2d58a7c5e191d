"""How far a long piece of writing is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Counted while it goes on. `total`: wanted altogether; `kept`: there from before; `written`: by this run;
    `skipped`: tried without success. `tokens`: written by this run, those of unfinished texts too."""

    total: int
    kept: int = 0
    written: int = 0
    skipped: int = 0
    tokens: int = 0
    _began: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> int:
        """So many of `total` are there."""
        return self.kept + self.written

    @property
    def seconds(self) -> float:
        """Since this run began."""
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


OnProgress = Callable[[Progress], object]
"""Called after every token: a bar decides itself how often it draws."""


def ignore(progress: Progress) -> None:
    """Nobody is told."""
