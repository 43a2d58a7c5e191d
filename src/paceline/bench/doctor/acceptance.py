"""Tokens per round by drafter, draft budget and kind of text, either stored or observed by replaying short replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.bench.replay.predict import format_budget
from paceline.bench.replay.run import Replayer, ReplayResult
from paceline.bench.replay.text_target import CannotReplay
from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Drafter
from paceline.llm import LLM
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from paceline.verify.tree import MIN_ROWS

STORED = Path(__file__).with_name("acceptance.json")
"""Stored acceptance, created by benchmarks/acceptance.py."""

PROMPTS = {
    "writing": "Write the opening paragraph of a story about a lighthouse keeper who has lost track of the days.",
    "coding": "Write a Python function that returns the longest word of a sentence, with a docstring and an example.",
    "math": "A baker sells 24 rolls at 45 cents each and 10 loaves at 3 dollars each. What does she earn in all?",
    "summary": "Summarise in three sentences: Tides rise and fall because the moon pulls on the ocean nearest to it "
    "more than on the Earth as a whole, and on the far ocean less. The Earth turns beneath the two bulges that result, "
    "so that most coasts see two high tides and two low tides a day. When the sun pulls along the same line, the tides "
    "are higher than usual.",
    "extraction": "List every name and number in this text as 'name: number'. Anna ran 12 km, Boris 7 km and Carla 21 "
    "km. Anna's brother Dan swam 3 km, and Eva, who is Boris's neighbour, cycled 64 km.",
    "explanation": "Explain to a curious teenager how a refrigerator keeps food cold.",
}
"""Prompts for drafters without stored acceptance."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Mean values per round at one draft budget.

    Attributes:
        tokens: Tokens, including the target's own token.
        rows: Rows of the pass, at least `MIN_ROWS`.
    """

    tokens: float
    rows: float


@dataclass(frozen=True, slots=True)
class TextKind:
    """A kind of text.

    Attributes:
        prompt: Mean prompt length in tokens.
        gains: Draft budget -> gain of a round.
    """

    prompt: float
    gains: Mapping[DraftBudget, Gain]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a drafter.

    Attributes:
        kinds: Gains by kind of text.
        source: Description of where they come from.
    """

    kinds: Mapping[str, TextKind]
    source: str


@cache
def _stored() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))


def stored_drafters(model: Loaded) -> list[str]:
    """Return the drafters with stored acceptance for this model."""
    return list(_stored()["drafters"]) if model.path.name == _stored()["file"] else []


def stored(model: Loaded, drafter: str, budgets: Sequence[DraftBudget]) -> Acceptance | None:
    """Return a drafter's stored acceptance, or None if it does not cover all `budgets`."""
    if drafter not in stored_drafters(model):
        return None
    table = _stored()["drafters"][drafter]
    if any(format_budget(budget) not in table for budget in budgets):
        return None
    kinds = {}
    for name, prompt in _stored()["prompt_tokens"].items():
        kinds[name] = TextKind(prompt, {budget: Gain(*table[format_budget(budget)][name]) for budget in budgets})
    return Acceptance(kinds, f"stored, from {_stored()['questions']} Spec-Bench questions")


def write_replies(model: Loaded, prompts: Mapping[str, Sequence[str]], tokens: int) -> dict[str, list[RecordedReply]]:
    """Generate greedy replies in the form of recorded replies.

    Args:
        model: The model.
        prompts: Kind of text -> prompts.
        tokens: Maximum length of a reply in tokens.

    Returns:
        Kind of text -> replies.
    """
    llm, how = LLM(model), Sampling(max_new_tokens=tokens, seed=0)

    def reply(text: str) -> RecordedReply:
        prompt = llm.prompt_ids(text)
        done = llm.generate(prompt, how)
        return RecordedReply(tuple(prompt), tuple(done.token_ids), done.finish_reason, how)

    return {kind: [reply(text) for text in texts] for kind, texts in prompts.items()}


def observe(
    model: Loaded,
    drafter: Drafter,
    budgets: Sequence[DraftBudget],
    replies: Mapping[str, Sequence[RecordedReply]],
) -> tuple[Acceptance, dict[DraftBudget, float]]:
    """Replay a drafter over replies.

    Args:
        model: The target.
        drafter: The drafter.
        budgets: Draft budgets to try.
        replies: Kind of text -> replies.

    Returns:
        Acceptance, and draft budget -> median time of a draft in seconds.
    """
    replayer = Replayer(model)
    gains: dict[str, dict[DraftBudget, Gain]] = {kind: {} for kind in replies}
    seconds: dict[DraftBudget, float] = {}
    for budget in budgets:
        times: list[float] = []
        for kind, texts in replies.items():
            found = _replayed(replayer, model, drafter, budget, texts)
            gains[kind][budget] = Gain(found.tokens / max(1, found.rounds), found.rows / max(1, found.rounds))
            times += found.draft_seconds
        seconds[budget] = median(times[1:] or times or [0.0])  # the first draft is a warm-up
    kinds = {
        kind: TextKind(fmean(len(reply.prompt) for reply in texts), gains[kind]) for kind, texts in replies.items()
    }
    return Acceptance(kinds, f"observed here, over {sum(map(len, replies.values()))} short replies"), seconds


def _replayed(
    replayer: Replayer, model: Loaded, drafter: Drafter, budget: DraftBudget, replies: Sequence[RecordedReply]
) -> ReplayResult:
    """Replay replies. With a drafter that runs the target's own layers, generate them again instead."""
    with suppress(CannotReplay):
        return replayer.run(replies, drafter, budget)
    llm = LLM(model, drafter, budget)
    stats = [llm.generate(list(reply.prompt), reply.sampling).stats for reply in replies]
    rows = sum(max(MIN_ROWS * s.rounds, s.rounds + s.drafted) for s in stats)
    return ReplayResult(stats, rows, 0.0, [s.seconds["draft"] / max(1, s.rounds) for s in stats], 0.0)
