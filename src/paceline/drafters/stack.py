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
    """State saved by each drafter. `needed`: the states of drafters that need the past (`Drafter.needs_past`)."""

    parts: tuple[Saved | None, ...]
    needed: tuple[Saved, ...]

    def holds(self, length: int, prompt: int) -> bool:
        return all(part.holds(length, prompt) for part in self.needed)


class DrafterStack(Drafter):
    """For each request the first drafter with a draft wins; a later one is asked only where the earlier have none.

    All observe every token, so each can take over in any round. None is asked for more than its own `draft` budget (a
    lookup drafts for nothing, a draft model pays a pass per token); the stack's budget has room for any of them. A
    drafter belongs to one stack only. Raises `InvalidOption` for an empty stack.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidOption("a drafter stack must hold at least one drafter, got none", "Give one, or drafter=None")
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
        empty = list(range(len(asks)))
        for drafter in self._drafters:
            if not empty:
                break
            for i, draft in zip(empty, drafter.propose([_within(asks[i], drafter.draft) for i in empty]), strict=True):
                drafts[i] = draft
            empty = [i for i in empty if not drafts[i].tokens]
        return drafts

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)


class DrafterWrapper(DrafterStack):
    """Stack of one drafter that passes every call on to it: override what you want to observe or change."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__([inner])
        self.inner = inner

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.inner.propose(asks)


def _within(ask: Ask, size: DraftBudget) -> Ask:
    """Return the same ask with a budget of at most `size`."""
    budget = ask.budget
    nodes, depth = min(budget.nodes, size.nodes), min(budget.depth, size.depth)
    return replace(ask, budget=DraftBudget(nodes, depth, min(budget.branch, size.branch)))
