"""Several drafters in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from torch import Tensor

from paceline.drafters.base import Ask, Drafter, Stage
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
    per token); the stack's budget has room for any of them. Lookups and learned drafters are stages of their own: what
    one costs says nothing of the other. A drafter belongs to one stack only. Raises `InvalidOption` for an empty stack.
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
        self._runs = [tuple(run) for _, run in groupby(drafters, attrgetter("free"))]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(_widest(run), run[0].free, any(d.reads_prompt for d in run)) for run in self._runs)

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
        stage = asks[0].stage if asks else None
        asked = self._drafters if stage is None else self._runs[stage]
        lookups = [drafter for drafter in self._drafters if drafter.free]
        for drafter in asked:
            self._fill(drafts, asks, drafter, drafter.free and not self._drafters[-1].free)
        # The others may have been unable to draft: of a text whose hidden states are missing, for example.
        for drafter in lookups if not asked[-1].free else ():
            self._fill(drafts, asks, drafter, False)
        return drafts

    def _fill(self, drafts: list[Draft], asks: Sequence[Ask], drafter: Drafter, holds_back: bool) -> None:
        """Let a drafter draft where there is no draft yet, and lookups continue its chains. `holds_back`: unless it is
        sure, for another one."""
        empty = [i for i, draft in enumerate(drafts) if not draft.tokens]
        if not empty:
            return
        own = []
        for ask in (asks[i] for i in empty):
            sure = (SURE if ask.stage is None else ask.sure) if holds_back else 0.0
            own.append(replace(ask, budget=ask.budget.limited(drafter.draft), sure=sure, stage=None))
        for i, draft in zip(empty, drafter.propose(own), strict=True):
            drafts[i] = draft if drafter.free else self._extended(asks[i], draft)

    def _extended(self, ask: Ask, draft: Draft) -> Draft:
        # Under the rules that draw, all of a chain is drawn or none of it.
        if not draft.tokens or ask.draws or draft.parents != (*range(len(draft.tokens)),):
            return draft
        own = len(draft.tokens)
        for drafter in self._drafters:
            draft = drafter.extend(replace(ask, budget=ask.room or ask.budget), draft) if drafter.free else draft
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
    def stages(self) -> tuple[Stage, ...]:
        inner = self.inner.stages
        return inner if len(inner) > 1 else (Stage(self.draft, self.free, self.reads_prompt),)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.inner.propose(asks)


def _widest(drafters: Sequence[Drafter]) -> DraftBudget:
    """Return the least budget with room for the draft of any of them."""
    sizes = [drafter.draft for drafter in drafters]
    return DraftBudget(max(s.nodes for s in sizes), max(s.depth for s in sizes), max(s.branch for s in sizes))
