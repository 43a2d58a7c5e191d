"""An engine with a prefix cache that records prefix hits."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.base import Drafter
from paceline.engine.detokenizer import TextStream
from paceline.engine.engine import Engine
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request
from paceline.engine.stats import Stats
from paceline.protocols import Target
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget


class CachedEngine(Engine):
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        draft: DraftBudget | None,
        prefixes: PrefixCache,
        name: str = "the drafter",
    ) -> None:
        super().__init__(target, {name: drafter} if drafter else None, draft)
        self.drafter, self.prefixes = drafter, prefixes
        self.cached: list[int] = []
        """For each request, the number of tokens that came from the prefix cache."""

    def _load_prefix(self, request: Request) -> int:
        self.cached.append(super()._load_prefix(request))
        return self.cached[-1]


def begun(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> Request:
    """Return a prefilled request."""
    stream = TextStream(sampling, (), lambda ids: "", engine.target.context_length - len(prompt))
    request = engine.start(prompt, sampling.sampler(), stream, Stats(7, "rounding"))
    engine.prefill(request)
    return request
