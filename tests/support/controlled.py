"""A controller that tests drive round by round with plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.draft_length import Controller, DraftPlan, Outcome, RequestState
from paceline.types import Draft, DraftBudget, Verdict


def fixed_plan(
    controller: Controller, requests: Sequence[RequestState], budget: DraftBudget, pace: float = 0.0
) -> DraftPlan:
    """Return a plan that gives each request this budget, which is one of the controller's sizes."""
    # A pause never follows a plan with a best size, so every round gets such a plan.
    best = len(controller.sizes) - 1
    return DraftPlan([budget] * len(requests), pace=pace, size_index=controller.sizes.index(budget), best_index=best)


class Driven(Controller):
    """Remembers its latest plan until `take` gets the outcome."""

    last = DraftPlan(())
    states: Sequence[RequestState] = ()

    def choose(
        self,
        together: int = 1,
        unread: int = 0,
        left: int = 1 << 30,
        written: int = 0,
        fresh: int = 0,
        asked: int | None = None,
    ) -> DraftBudget:
        """Plan for `asked` of `together` requests (default: all) with `unread` tokens in total. Return the size."""
        count = asked or together
        self.states = [RequestState(unread // count, left, written, i < fresh) for i in range(count)]
        self.last = self.plan(self.states, together)
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
        own = self.states[: len(drafts)]
        ended = [r.written + len(v.tokens) for r, v in zip(own, verdicts, strict=True) if v.finish]
        seen = own, budgets, drafts, verdicts, drafting, verifying, together, rows
        self.learn(Outcome(self.last, *seen, other_tokens=others, ended_lengths=ended))
