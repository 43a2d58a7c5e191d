"""Several drafters in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.drafters.base import Allowance, Ask, Drafter, Part
from paceline.errors import InvalidOption
from paceline.protocols import KVCache, Saved, common_most
from paceline.types import Draft, DraftBudget, Tap, Verdict

SURE = 0.5
"""Probability from which a lookup's first token is worth more than a learned drafter's, which takes time
(docs/notes/drafters.md#cascades)."""


@dataclass(frozen=True, slots=True)
class SavedStack(Saved):
    """State saved by each drafter. `needed`: the states of drafters that need the past (`Drafter.needs_past`)."""

    parts: tuple[Saved | None, ...]
    needed: tuple[Saved, ...]

    def most(self, length: int, prompt: int) -> int:
        return common_most(self.needed, length, prompt)


class DrafterStack(Drafter):
    """For each request the first drafter with a draft wins; a later one is asked only where the earlier have none.

    A lookup speaks before a learned drafter only if it is sure (`Ask.sure`), and continues a chain that the other has
    made where it finds a match at its end (`Drafter.extend`). All observe every token, so each can take over in any
    round. None is asked for more than its own `draft` budget (a lookup drafts for nothing, a draft model pays a pass
    per token); the stack's budget has room for any of them. Lookups and learned drafters are parts with budgets of
    their own: what one costs says nothing of the other. A drafter belongs to one stack only. Raises `InvalidOption` for
    an empty stack.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidOption("a drafter stack must hold at least one drafter, got none", "Give one, or drafter=None")
        self._drafters = tuple(drafters)
        self.taps: tuple[Tap, ...] = tuple(dict.fromkeys(tap for d in drafters for tap in d.taps))
        self.replayable = all(d.replayable for d in drafters)
        self.free = all(d.free for d in drafters)
        self.reads_prompt = any(d.reads_prompt for d in drafters)
        self.draft: DraftBudget = _widest(drafters)
        kinds = list(dict.fromkeys(drafter.free for drafter in drafters))
        self._part_of = [kinds.index(drafter.free) for drafter in drafters]
        self._parts = tuple(_part([drafter for drafter in drafters if drafter.free == kind]) for kind in kinds)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts

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
        drafts, learned = [Draft()] * len(asks), None if self._drafters[-1].free else self._part_of[-1]
        for drafter, part in zip(self._drafters, self._part_of, strict=True):
            self._fill(drafts, asks, drafter, part, learned if drafter.free else None)
        if learned is not None:
            # It may have been unable to draft: for a text whose hidden states are missing, for example.
            for drafter in self._drafters:
                if drafter.free:
                    self._fill(drafts, asks, drafter, learned)
        return drafts

    def _fill(
        self, drafts: list[Draft], asks: Sequence[Ask], drafter: Drafter, part: int, later: int | None = None
    ) -> None:
        """Let a drafter draft, with a part's allowance, where there is no draft yet, and let lookups continue its
        chains. `later`: the part of a learned drafter that is asked next, which only a sure draft comes before."""
        asked = dict[int, Ask]()
        for i, ask in enumerate(asks):
            if not drafts[i].tokens and (allowed := _allowance(ask, part)).budget.nodes:
                sure = SURE if later is not None and _allowance(ask, later).budget.nodes else 0.0
                budget = allowed.budget.limited(drafter.draft)
                asked[i] = replace(ask, budget=budget, price=allowed.price, pace=allowed.pace, sure=sure, parts=())
        for i, draft in zip(asked, drafter.propose([*asked.values()]) if asked else (), strict=True):
            draft = draft if drafter.free else self._extended(asks[i], draft)
            drafts[i] = draft if draft.part == part else replace(draft, part=part)

    def _extended(self, ask: Ask, draft: Draft) -> Draft:
        # Under the rules that draw, all of a chain is drawn or none of it.
        if not draft.tokens or ask.draws or draft.parents != (*range(len(draft.tokens)),):
            return draft
        own = len(draft.tokens)
        for drafter in self._drafters:
            draft = drafter.extend(ask, draft) if drafter.free else draft
        return replace(draft, lengthened=len(draft.tokens) - own)

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

    @property
    def parts(self) -> tuple[Part, ...]:
        inner = self.inner.parts
        return inner if len(inner) > 1 else (Part(self.draft, self.free, self.reads_prompt),)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.inner.propose(asks)


def _allowance(ask: Ask, part: int) -> Allowance:
    return ask.parts[part] if ask.parts else Allowance(ask.budget, ask.price, ask.pace)


def _part(drafters: Sequence[Drafter]) -> Part:
    """Return the part that drafters of one kind make."""
    return Part(_widest(drafters), drafters[0].free, any(drafter.reads_prompt for drafter in drafters))


def _widest(drafters: Sequence[Drafter]) -> DraftBudget:
    """Return the least budget with room for the draft of any of them."""
    sizes = [drafter.draft for drafter in drafters]
    return DraftBudget(max(s.nodes for s in sizes), max(s.depth for s in sizes), max(s.branch for s in sizes))
