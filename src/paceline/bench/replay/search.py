"""Search for the fastest drafter and draft size over recorded replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.bench.replay.predict import Candidate, CandidatePrediction, Predictor
from paceline.checkpoints.head_fit import shipped
from paceline.checkpoints.loader import Loaded
from paceline.recording.rows import RecordedReply
from paceline.types import DraftBudget

LOOKUPS = ("suffix", "suffix:remember", "ngram")
"""Drafters without weights. They may have no draft, so that another one can follow them."""
_CHAINS = (1, 2, 3, 4, 6, 8)
_TREES = (DraftBudget(3, 3, 2), DraftBudget(7, 4, 3), DraftBudget(15, 5, 4))
_LONG = (DraftBudget.chain(7), DraftBudget.chain(15), DraftBudget(7, 7, 3), DraftBudget(15, 15, 3))
_FEW = 8
"""Replies over which all candidates are compared; the best go over all replies."""
_FINALISTS = 5
_KEPT = 2
"""Sizes of a drafter that are tried behind a lookup."""

OnProgress = Callable[[str], object]


def parts_of(model: Loaded) -> list[str]:
    """Return the drafters that need nothing from the user: those without weights, and heads that come with Paceline."""
    heads = {"eagle3": "eagle3", "medusa": "medusa", "block": "block"}
    return [*LOOKUPS, *(name for name, kind in heads.items() if shipped(kind, model) is not None)]


def sizes_of(drafter: str) -> list[DraftBudget | None]:
    """Return the draft sizes to try: the controller's choice, chains and trees."""
    chains = [DraftBudget.chain(n) for n in _CHAINS]
    return [None, *(_LONG if drafter in LOOKUPS else [*chains, *_TREES])]


def cascades(best: dict[str, list[Candidate]]) -> list[Candidate]:
    """Return every pair of drafters in both orders in which the first may have no draft, at the best sizes of each
    alone."""
    pairs = [(a, b) for a in best if a in LOOKUPS for b in best if b.partition(":")[0] != a.partition(":")[0]]
    found = []
    for first, second in pairs:
        sizes = dict.fromkeys([None, *(c.size for c in (*best[first][:1], *best[second]))])
        found += [Candidate(f"{first}+{second}", size) for size in sizes]
    return found


def search(
    predictor: Predictor, replies: Sequence[RecordedReply], parts: Sequence[str], on_progress: OnProgress
) -> list[CandidatePrediction]:
    """Return predictions for the best candidates over all replies, the fastest first.

    Over a few replies each drafter is tried alone in every size, then behind each lookup in its best sizes. The best of
    these, one of each drafter among them, are replayed over all.
    """
    few = list(replies[:: max(1, len(replies) // _FEW)])[:_FEW]

    def ranked(candidates: Sequence[Candidate]) -> list[CandidatePrediction]:
        found = []
        for candidate in candidates:
            on_progress(candidate.name)
            found.append(predictor.predict(candidate, few))
        return sorted(found, key=_speed, reverse=True)

    alone = {part: ranked([Candidate(part, size) for size in sizes_of(part)]) for part in parts}
    best = {part: [p.candidate for p in found[:_KEPT]] for part, found in alone.items()}
    every = sorted([*(p for found in alone.values() for p in found), *ranked(cascades(best))], key=_speed, reverse=True)
    chosen = dict.fromkeys([*(p.candidate for p in every[:_FINALISTS]), *(found[0] for found in best.values())])
    finalists = []
    for candidate in chosen:
        on_progress(f"{candidate.name}, all replies")
        finalists.append(predictor.predict(candidate, replies))
    return sorted(finalists, key=_speed, reverse=True)


def recommended(finalists: Sequence[CandidatePrediction]) -> CandidatePrediction | None:
    """Return the fastest that is faster than plain decoding at the lower end of its interval; None if none is."""
    return next((p for p in finalists if p.ratio["low"] > 1.0), None)


def _speed(prediction: CandidatePrediction) -> float:
    return prediction.ratio["value"]
