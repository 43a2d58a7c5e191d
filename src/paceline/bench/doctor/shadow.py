"""Shadow drafting: drafts that are scored and timed but never verified, while plain decoding writes the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.wrapper import DrafterWrapper
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import MIN_ROWS


@dataclass(frozen=True, slots=True)
class Gain:
    """Means per round at one draft size: `tokens`, the target's own token included, and `rows` of the verify pass, at
    least `MIN_ROWS`."""

    tokens: float
    rows: float


class ShadowDrafter(DrafterWrapper):
    """Asks the inner drafter for drafts of every size, records them and proposes none.

    So one reply shows what every size would have given. Only the first draft of a round is timed, since only that one
    includes catching up; the sizes take turns at being first. Requests come one at a time.
    """

    def __init__(
        self, inner: Drafter, sizes: Sequence[DraftBudget], timer: Callable[[], float] = time.perf_counter
    ) -> None:
        """`sizes`: draft sizes, smallest first, none of them empty."""
        super().__init__(inner)
        self.draft, self._sizes, self._timer = sizes[-1], list(sizes), timer
        self.seconds: list[list[float]] = [[] for _ in sizes]
        """Drafting times by size."""
        self._drafts: dict[int, list[Draft]] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        (ask,) = asks
        first = len(self._drafts) % len(self._sizes)
        drafts = [Draft()] * len(self._sizes)
        for i in (first, *(i for i in range(len(self._sizes)) if i != first)):
            # A chain is a prefix of any longer one.
            if i != first and self._sizes[i].branch == 1 and i < len(self._sizes) - 1:
                continue
            size = self._sizes[i].within(ask.budget.depth)
            began = self._timer()
            (drafts[i],) = self.inner.propose([replace(ask, budget=size)])
            if i == first:
                self.seconds[i].append(self._timer() - began)
        self._drafts[ask.position + 1] = drafts
        return [Draft()]

    def count(self, token_ids: Sequence[int], totals: Sequence[RoundCounts]) -> None:
        """Add, per size, the rounds in which its drafts would have written a reply, and forget the drafts.

        `token_ids`: a prompt and its reply.
        """
        recorded, self._drafts = self._drafts, {}
        for i, (size, total) in enumerate(zip(self._sizes, totals, strict=True)):
            which, limit = (-1, size.nodes) if size.branch == 1 else (i, None)
            total.add({length: each[which] for length, each in recorded.items()}, token_ids, limit)


@dataclass(slots=True)
class RoundCounts:
    """Sums over rounds."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    rows: int = 0

    @property
    def gain(self) -> Gain:
        return Gain(self.tokens / self.rounds, self.rows / self.rounds) if self.rounds else Gain(1.0, MIN_ROWS)

    def add(self, drafts: Mapping[int, Draft], token_ids: Sequence[int], limit: int | None = None) -> None:
        """Add the rounds in which these drafts, each cut to `limit` tokens, would have written a reply.

        `drafts`: by the number of tokens before them.
        """
        at = start = min(drafts, default=len(token_ids))
        while at < len(token_ids):
            accepted, drafted = _score(drafts.get(at, Draft()), token_ids[at:], limit)
            self.rounds += 1
            self.drafted += drafted
            self.rows += max(MIN_ROWS, 1 + drafted)
            at = min(at + accepted + 1, len(token_ids))  # the target's own token may lie beyond the end
        self.tokens += at - start


def _score(draft: Draft, following: Sequence[int], limit: int | None) -> tuple[int, int]:
    """(tokens accepted, tokens drafted) of a draft, cut to `limit` tokens, where the text goes on with `following`."""
    tokens = draft.tokens[:limit]
    row = accepted = 0
    children = {edge: node for node, edge in enumerate(zip(draft.parents, tokens, strict=False), 1)}
    while accepted < len(following) and (row, following[accepted]) in children:
        row = children[row, following[accepted]]
        accepted += 1
    return accepted, len(tokens)
