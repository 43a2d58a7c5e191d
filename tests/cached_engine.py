"""An engine with a prefix cache: what the verbs are for, in the fewest lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.engine import Engine, Request
from paceline.prefix import PrefixCache
from paceline.protocols import Drafter, Target
from paceline.sampling import Sampling
from paceline.stats import Stats
from paceline.stream import TextStream
from paceline.types import Tree


class CachedEngine(Engine):
    """Looks every prompt up when it starts, and keeps every text when it ends."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        draft: Tree | None,
        prefixes: PrefixCache,
        name: str = "the drafter",
    ) -> None:
        super().__init__(target, drafter, draft)
        self.prefixes, self.name = prefixes, name
        self.cached: list[int] = []
        """Of each request the tokens that were not fed."""

    def start(self, sampler: Any, stream: Any, stats: Any, like: Request | None = None) -> Request:
        request = super().start(sampler, stream, stats, like)
        self.cached.append(0 if like else self._begin(request))
        return request

    def _begin(self, request: Request) -> int:
        hit = self.prefixes.find(request.text, self.name if self.drafter and self.drafter.needs_past else None)
        if hit is None:
            return 0
        length = self.cache.load(request.slot, hit.target, hit.length)
        if self.drafter and (saved := hit.drafters.get(self.name)):
            self.drafter.load(request.slot, saved, hit.length)
        return length

    def keep(self, request: Request) -> None:
        """Before `finish`, or once a prompt has been fed."""
        saved = self.drafter.save(request.slot) if self.drafter else None
        target = self.cache.save(request.slot)
        self.prefixes.store(request.text, request.sampler.prompt, target, {self.name: saved})

    def _finish(self, request: Request) -> None:
        if not request.closed and not request.error:
            self.keep(request)
        super()._finish(request)


def begun(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> Request:
    """A request that has been prefilled."""
    stream = TextStream(sampling, (), lambda ids: "", engine.target.context_length - len(prompt))
    request = engine.start(sampling.sampler(prompt), stream, Stats(7, "rounding"))
    engine.prefill(request)
    return request
