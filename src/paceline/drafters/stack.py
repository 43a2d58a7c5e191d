"""Several drafters in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.drafters.base import Ask, Drafter
from paceline.errors import InvalidOption
from paceline.protocols import KVCache, Saved
from paceline.types import Draft, DraftBudget, Tap, Verdict


@dataclass(frozen=True, slots=True)
class SavedStack(Saved):
    """What each of the drafters saved. `needed`: those who cannot do without."""

    parts: tuple[Saved | None, ...]
    needed: tuple[Saved, ...]

    def holds(self, length: int, prompt: int) -> bool:
        return all(part.holds(length, prompt) for part in self.needed)


class DrafterStack(Drafter):
    """Per request the first drafter with something to say wins; a later one is asked only where the earlier are silent.

    All are told about every token, so each can take over at any round. None is asked for more than its own `draft`
    (what a lookup drafts for nothing may cost a draft model a pass per token); the stack's `draft` has room for any of
    them. Put a drafter into one stack only. Raises `InvalidOption` for a stack of none.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidOption("a stack of no drafters", "Give at least one drafter, or drafter=None")
        self._drafters = tuple(drafters)
        self.taps: tuple[Tap, ...] = tuple(dict.fromkeys(tap for d in drafters for tap in d.taps))
        sizes = [d.draft for d in drafters]
        self.draft: DraftBudget = DraftBudget(
            max(s.nodes for s in sizes), max(s.depth for s in sizes), max(s.branch for s in sizes)
        )

    def bind(self, cache: KVCache) -> None:
        for drafter in self._drafters:
            drafter.bind(cache)

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.admit(slot, prompt)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.fork(slot, source, prompt)

    @property
    def needs_past(self) -> bool:
        return any(drafter.needs_past for drafter in self._drafters)

    def save(self, slot: int) -> SavedStack | None:
        parts = tuple(drafter.save(slot) for drafter in self._drafters)
        kept = tuple(part for part in parts if part)
        needed = tuple(part for part, d in zip(parts, self._drafters, strict=True) if part and d.needs_past)
        if not kept or len(needed) < sum(d.needs_past for d in self._drafters):
            return None
        length = min(part.length for part in needed or kept)
        return SavedStack(length, tuple(x for part in kept for x in part.tensors), parts, needed)

    def load(self, slot: int, saved: SavedStack, length: int) -> None:
        for drafter, part in zip(self._drafters, saved.parts, strict=True):
            if part:
                drafter.load(slot, part, length)

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.feed(slot, tokens, taps)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = [Draft()] * len(asks)
        silent = list(range(len(asks)))
        for drafter in self._drafters:
            if not silent:
                break
            for i, draft in zip(
                silent, drafter.propose([_within(asks[i], drafter.draft) for i in silent]), strict=True
            ):
                drafts[i] = draft
            silent = [i for i in silent if not drafts[i].tokens]
        return drafts

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)


def _within(ask: Ask, size: DraftBudget) -> Ask:
    """The same request, for no more than `size`."""
    budget = ask.budget
    nodes, depth = min(budget.nodes, size.nodes), min(budget.depth, size.depth)
    return replace(ask, budget=DraftBudget(nodes, depth, min(budget.branch, size.branch)))
