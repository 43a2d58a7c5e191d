"""Drafts that are looked at and not used: how right they would have been, and how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.wrapper import DrafterWrapper
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import MIN_ROWS

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a round gives with drafts of one size: `tokens`, the target's own included, from a pass of so many `rows`
    (of which there are `MIN_ROWS` at least, so that the mean is not that of the drafts and one)."""

    tokens: float
    rows: float


class Onlooker(DrafterWrapper):
    """Asks the drafter inside for drafts of every size, notes them, and hands out none: the text is plain decoding's.

    So one reply shows what every size would have given. Only the first draft of a round is timed, which like any draft
    begins with catching up; sizes take turns at it. Requests come one after the other.
    """

    def __init__(self, inner: Drafter, sizes: Sequence[DraftBudget], clock: Clock = time.perf_counter) -> None:
        """`sizes`: none of them empty, smallest first."""
        super().__init__(inner)
        self.draft, self._sizes, self._clock = sizes[-1], list(sizes), clock
        self.seconds: list[list[float]] = [[] for _ in sizes]
        """Of each size, what a draft took."""
        self._drafts: dict[int, list[Draft]] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        (ask,) = asks
        turn = len(self._drafts) % len(self._sizes)
        order = [turn, *(at for at in range(len(self._sizes)) if at != turn)]
        drafts = dict.fromkeys(order, Draft())
        for place, at in enumerate(order):
            # A chain begins as a longer one does.
            if place and self._sizes[at].branch == 1 and at < len(self._sizes) - 1:
                continue
            size = self._sizes[at].within(ask.budget.depth)
            began = self._clock()
            (drafts[at],) = self.inner.propose([replace(ask, budget=size)])
            if not place:
                self.seconds[at].append(self._clock() - began)
        self._drafts[len(ask.token_ids)] = [drafts[at] for at in range(len(self._sizes))]
        return [Draft()]

    def outcome(self, text: Sequence[int]) -> list[Outcome]:
        """Of each size, how the drafts for this text (prompt and reply) would have fared. They are then forgotten."""
        noted, self._drafts = self._drafts, {}
        found = []
        for at, size in enumerate(self._sizes):
            chain = size.branch == 1
            drafts = {length: every[-1 if chain else at] for length, every in noted.items()}
            most = size.nodes if chain else None
            found.append(Outcome({n: _fate(draft, text[n:], most) for n, draft in drafts.items()}, len(text)))
        return found


def _fate(draft: Draft, rest: Sequence[int], most: int | None) -> tuple[int, int]:
    """(tokens that would be kept, tokens drafted) of a draft for a text that goes on with `rest`, cut to `most`."""
    tokens = draft.tokens[:most]
    row = kept = 0
    children = {edge: node for node, edge in enumerate(zip(draft.parents, tokens, strict=False), 1)}
    while kept < len(rest) and (row, rest[kept]) in children:
        row = children[row, rest[kept]]
        kept += 1
    return kept, len(tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`fates`: by length of the text before it, what would be kept of a draft and what was drafted. `end`: the whole
    text's length."""

    fates: dict[int, tuple[int, int]]
    end: int

    def rounds(self) -> tuple[int, int, int, int]:
        """(rounds, tokens, drafted, rows) of a reply that is written with these drafts."""
        at = begin = min(self.fates, default=self.end)
        rounds = drafted = rows = 0
        while at < self.end:
            kept, offered = self.fates.get(at, (0, 0))
            drafted += offered
            rows += max(MIN_ROWS, 1 + offered)
            rounds += 1
            # The token that the target adds may be beyond the end.
            at = min(at + kept + 1, self.end)
        return rounds, at - begin, drafted, rows


@dataclass(slots=True)
class RoundTally:
    """Rounds of many replies."""

    rounds: int = 0
    tokens: int = 0
    rows: int = 0

    def add(self, outcome: Outcome) -> None:
        rounds, tokens, _, rows = outcome.rounds()
        self.rounds += rounds
        self.tokens += tokens
        self.rows += rows

    @property
    def gain(self) -> Gain:
        return Gain(self.tokens / self.rounds, self.rows / self.rounds) if self.rounds else Gain(1.0, MIN_ROWS)
