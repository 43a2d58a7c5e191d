"""Cascades: drafters that are asked one after another, in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.drafters.base import Allowance, Ask, Drafter, DrafterPart
from paceline.errors import InvalidOption
from paceline.protocols import KVCache, Saved, common_most
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import paths_of

MIN_LOOKUP_PROBABILITY = 0.5
"""Probability above which the first token of a lookup is worth more than the first token of a learned drafter, which
takes time (docs/notes/drafters.md#cascades)."""


@dataclass(frozen=True, slots=True)
class SavedStack(Saved):
    """The saved state of each drafter.

    Attributes:
        parts: The state of each drafter, or None for a drafter without a state.
        needed: The states of the drafters that need the past (`Drafter.needs_past`).
    """

    parts: tuple[Saved | None, ...]
    needed: tuple[Saved, ...]

    def most(self, length: int, prompt: int) -> int:
        return common_most(self.needed, length, prompt)


class DrafterStack(Drafter):
    """Asks several drafters in order. A later drafter is asked only for the requests that have no draft yet.

    A lookup before a learned drafter proposes only if it is sure (`Ask.sure`). It also extends the deepest path of the
    learned drafter's draft if it finds a match at the path's end (`Drafter.extend`). All drafters observe every token,
    so each of them can draft in any round. No drafter is asked for more than its own `draft` budget, because a lookup
    drafts for free, but a draft model needs a pass per token. The stack's budget has room for the draft of any of its
    drafters. Lookups and learned drafters are separate parts with their own budgets, because their costs are unrelated.
    A drafter may belong to only one stack.

    Args:
        drafters: The drafters, at least one.

    Raises:
        InvalidOption: If there are no drafters.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise InvalidOption("a drafter stack must hold at least one drafter, got none", "Add one, or use None")
        self._drafters = tuple(drafters)
        self.taps: tuple[Tap, ...] = tuple(dict.fromkeys(tap for d in drafters for tap in d.taps))
        self.replayable = all(d.replayable for d in drafters)
        self.free = all(d.free for d in drafters)
        self.reads_prompt = any(d.reads_prompt for d in drafters)
        self.draft: DraftBudget = _enclosing_budget(drafters)
        kinds = list(dict.fromkeys(drafter.free for drafter in drafters))
        self._part_of = [kinds.index(drafter.free) for drafter in drafters]
        self._parts = tuple(_part([drafter for drafter in drafters if drafter.free == kind]) for kind in kinds)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters, in order."""
        return self._drafters

    @property
    def parts(self) -> tuple[DrafterPart, ...]:
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

    def unread(self, slot: int) -> int | None:
        counts = [drafter.unread(slot) for drafter in self._drafters if drafter.reads_prompt and not drafter.free]
        known = [count for count in counts if count is not None]
        return max(known) if known and len(known) == len(counts) else None

    def save(self, slot: int) -> SavedStack | None:
        parts = tuple(drafter.save(slot) for drafter in self._drafters)
        kept, needed = tuple(part for part in parts if part), self._needed(parts)
        if not kept or len(needed) < sum(d.needs_past for d in self._drafters):
            return None
        length = min(part.length for part in needed or kept)
        return SavedStack(length, tuple(x for part in kept for x in part.tensors), parts, needed)

    def _needed(self, parts: Sequence[Saved | None]) -> tuple[Saved, ...]:
        return tuple(part for part, d in zip(parts, self._drafters, strict=True) if part and d.needs_past)

    def restored(self, saved: SavedStack) -> SavedStack:
        parts = tuple(part and d.restored(part) for part, d in zip(saved.parts, self._drafters, strict=True))
        return replace(saved, parts=parts, needed=self._needed(parts))

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
            # The learned drafter may have no draft, for example because hidden states are missing. In this case, ask
            # the lookups again, without requiring them to be sure.
            for drafter in self._drafters:
                if drafter.free:
                    self._fill(drafts, asks, drafter, learned)
        return drafts

    def _fill(
        self, drafts: list[Draft], asks: Sequence[Ask], drafter: Drafter, part: int, later: int | None = None
    ) -> None:
        """Ask a drafter for the drafts that are still empty, and let lookups extend its drafts.

        Args:
            drafts: The drafts so far. They are changed in place.
            asks: The requests for drafts.
            drafter: The drafter to ask.
            part: The part whose allowance applies.
            later: The part of the learned drafter that is asked next. If it has an allowance, this drafter must be sure
                of its draft (`Ask.sure`). None if no learned drafter is asked next.
        """
        asked = dict[int, Ask]()
        for i, ask in enumerate(asks):
            if not drafts[i].tokens and (allowed := _allowance(ask, part)).budget.nodes:
                sure = MIN_LOOKUP_PROBABILITY if later is not None and _allowance(ask, later).budget.nodes else 0.0
                budget = allowed.budget.limited(drafter.draft)
                asked[i] = replace(ask, budget=budget, price=allowed.price, pace=allowed.pace, sure=sure, parts=())
        for i, draft in zip(asked, drafter.propose([*asked.values()]) if asked else (), strict=True):
            draft = draft if drafter.free else self._extended(asks[i], draft)
            unread = drafts[i].unread or draft.unread
            drafts[i] = (
                draft if (draft.part, draft.unread) == (part, unread) else replace(draft, part=part, unread=unread)
            )

    def _extended(self, ask: Ask, draft: Draft) -> Draft:
        """Return a learned drafter's draft, with its deepest path extended by the lookups."""
        # For acceptance rules that draw, a path must not mix drawn tokens with other tokens.
        if not draft.tokens or ask.draws:
            return draft
        rows = max(paths_of(draft).values(), key=len)
        path = Draft.chain([draft.tokens[row - 1] for row in rows])
        room = ask.budget.within(ask.budget.depth, ask.budget.nodes - len(draft.tokens) + len(rows))
        for drafter in self._drafters:
            path = drafter.extend(replace(ask, budget=room), path) if drafter.free else path
        more = path.tokens[len(rows) :]
        parents = (rows[-1], *range(len(draft.tokens) + 1, len(draft.tokens) + len(more)))[: len(more)]
        return replace(draft, tokens=draft.tokens + more, parents=draft.parents + parents, lengthened=len(more))

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        for drafter in self._drafters:
            drafter.observe(slot, verdict, out)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)


class DrafterWrapper(DrafterStack):
    """A stack with a single drafter, which forwards every call to it. Override methods to observe or change calls."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__([inner])
        self.inner = inner

    @property
    def parts(self) -> tuple[DrafterPart, ...]:
        inner = self.inner.parts
        return inner if len(inner) > 1 else (DrafterPart(self.draft, self.free, self.reads_prompt),)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.inner.propose(asks)


def _allowance(ask: Ask, part: int) -> Allowance:
    return ask.parts[part] if ask.parts else Allowance(ask.budget, ask.price, ask.pace)


def _part(drafters: Sequence[Drafter]) -> DrafterPart:
    """Return the part that consists of these drafters. They must all be lookups, or all be learned drafters."""
    return DrafterPart(_enclosing_budget(drafters), drafters[0].free, any(drafter.reads_prompt for drafter in drafters))


def _enclosing_budget(drafters: Sequence[Drafter]) -> DraftBudget:
    """Return the smallest budget that has room for the draft of any of these drafters."""
    sizes = [drafter.draft for drafter in drafters]
    return DraftBudget(max(s.nodes for s in sizes), max(s.depth for s in sizes), max(s.branch for s in sizes))
