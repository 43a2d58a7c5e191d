"""A controller that is driven round by round with plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.draft_length import Controller, DraftPlan, Outcome, Standing
from paceline.types import Draft, DraftBudget, Verdict


def fixed_plan(
    controller: Controller, requests: Sequence[Standing], budget: DraftBudget, pace: float = 0.0
) -> DraftPlan:
    """Return the plan to give each request this budget, one of the controller's sizes."""
    # No pause follows a plan in which some size seems best, so every round has such a plan.
    best = len(controller.sizes) - 1
    return DraftPlan([budget] * len(requests), pace=pace, at=controller.sizes.index(budget), best=best)


class Driven(Controller):
    """Remembers its latest plan until the outcome is there."""

    last = DraftPlan(())
    standings: Sequence[Standing] = ()

    def choose(
        self,
        together: int = 1,
        unread: int = 0,
        left: int = 1 << 30,
        written: int = 0,
        fresh: int = 0,
        asked: int | None = None,
    ) -> DraftBudget:
        """Plan for `asked` (all) of `together` requests, which have `unread` tokens in all. Returns the size."""
        count = asked or together
        self.standings = [Standing(unread // count, left, written, i < fresh) for i in range(count)]
        self.last = self.plan(self.standings, together)
        return self.last.budgets[0]

    def take(
        self,
        budgets: Sequence[DraftBudget],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        drafting: float,
        verifying: float,
        together: int,
        rows: int,
        others: int = 0,
    ) -> None:
        """Learn from the outcome of the latest plan."""
        own = self.standings[: len(drafts)]
        ended = [r.written + len(v.tokens) for r, v in zip(own, verdicts, strict=True) if v.finish]
        seen = own, budgets, drafts, verdicts, drafting, verifying, together, rows
        self.learn(Outcome(self.last, *seen, others=others, ended=ended))
