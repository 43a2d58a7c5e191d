"""Searching for the fastest drafter and draft budget over recorded replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.bench.replay.predict import Candidate, CandidatePrediction, Predictor
from paceline.checkpoints.head_fit import shipped_head
from paceline.checkpoints.loader import Loaded
from paceline.recording.rows import RecordedReply
from paceline.types import DraftBudget

LOOKUPS = ("suffix", "suffix:remember", "ngram")
"""Drafters without weights. If they have no draft, another drafter can take over."""
_CHAINS = (1, 2, 3, 4, 6, 8)
_TREES = (DraftBudget(3, 3, 2), DraftBudget(7, 4, 3), DraftBudget(15, 5, 4))
_LOOKUP_BUDGETS = (DraftBudget.chain(7), DraftBudget.chain(15), DraftBudget(7, 7, 3), DraftBudget(15, 15, 3))
_SUBSET = 8
"""Number of replies over which all candidates are compared. Only the best candidates replay all replies."""
_FINALISTS = 5
_COMBINED_BUDGETS = 2
"""Number of a drafter's budgets to try in combination with a lookup."""

OnProgress = Callable[[str], object]


def parts_of(model: Loaded) -> list[str]:
    """Return the drafters that need no files of the user: lookups, and heads that are included in Paceline."""
    heads = {"eagle3": "eagle3", "medusa": "medusa", "block": "block"}
    return [*LOOKUPS, *(name for name, kind in heads.items() if shipped_head(kind, model) is not None)]


def budgets_of(drafter: str) -> list[DraftBudget | None]:
    """Return the draft budgets to try: chains, trees, and None, which lets a controller choose."""
    chains = [DraftBudget.chain(n) for n in _CHAINS]
    return [None, *(_LOOKUP_BUDGETS if drafter in LOOKUPS else [*chains, *_TREES])]


def cascades(best: dict[str, list[Candidate]]) -> list[Candidate]:
    """Combine each lookup with every other drafter, at the best budgets of the single drafters."""
    pairs = [(a, b) for a in best if a in LOOKUPS for b in best if b.partition(":")[0] != a.partition(":")[0]]
    found = []
    for first, second in pairs:
        budgets = dict.fromkeys([None, *(c.budget for c in (*best[first][:1], *best[second]))])
        found += [Candidate(f"{first}+{second}", budget) for budget in budgets]
    return found


def search(
    predictor: Predictor, replies: Sequence[RecordedReply], parts: Sequence[str], on_progress: OnProgress
) -> list[CandidatePrediction]:
    """Find the best candidates.

    First, each drafter is tried with every budget over a few replies. Then each lookup is combined with the best
    budgets of every other drafter. Finally the best candidates, including the best one of each drafter, replay all
    replies.

    Args:
        predictor: Predicts the speed of a candidate.
        replies: Recorded replies.
        parts: Drafters to try.
        on_progress: Called with the name of each candidate.

    Returns:
        Predictions for the best candidates over all replies, fastest first.
    """
    few = list(replies[:: max(1, len(replies) // _SUBSET)])[:_SUBSET]

    def ranked(candidates: Sequence[Candidate]) -> list[CandidatePrediction]:
        found = []
        for candidate in candidates:
            on_progress(candidate.name)
            found.append(predictor.predict(candidate, few))
        return sorted(found, key=_speed, reverse=True)

    alone = {part: ranked([Candidate(part, budget) for budget in budgets_of(part)]) for part in parts}
    best = {part: [p.candidate for p in found[:_COMBINED_BUDGETS]] for part, found in alone.items()}
    every = sorted([*(p for found in alone.values() for p in found), *ranked(cascades(best))], key=_speed, reverse=True)
    chosen = dict.fromkeys([*(p.candidate for p in every[:_FINALISTS]), *(found[0] for found in best.values())])
    finalists = []
    for candidate in chosen:
        on_progress(f"{candidate.name}, all replies")
        finalists.append(predictor.predict(candidate, replies))
    return sorted(finalists, key=_speed, reverse=True)


def recommended(finalists: Sequence[CandidatePrediction]) -> CandidatePrediction | None:
    """Return the fastest candidate with an interval that stays above 1.0, or None if there is none."""
    return next((p for p in finalists if p.speedup["low"] > 1.0), None)


def _speed(prediction: CandidatePrediction) -> float:
    return prediction.speedup["value"]
