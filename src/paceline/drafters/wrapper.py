"""Base class for drafters that wrap another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.protocols import KVCache, Saved
from paceline.types import Draft, Tap, Verdict


class DrafterWrapper(Drafter):
    """Forwards every call to `inner`: override what you want to observe or change."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.taps, self.draft = inner, inner.taps, inner.draft

    def bind(self, cache: KVCache) -> None:
        self.inner.bind(cache)

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self.inner.admit(slot, prompt)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self.inner.fork(slot, source, prompt)

    @property
    def needs_past(self) -> bool:
        return self.inner.needs_past

    def save(self, slot: int) -> Saved | None:
        return self.inner.save(slot)

    def load(self, slot: int, saved: Saved, length: int) -> None:
        self.inner.load(slot, saved, length)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self.inner.feed(slot, tokens, taps)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.inner.propose(asks)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self.inner.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        self.inner.release(slot)
