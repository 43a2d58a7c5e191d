"""Tokens per round by drafter, draft size and kind of text, stored or observed here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.bench.doctor.shadow import Gain, RoundCounts, ShadowDrafter
from paceline.checkpoints.loader import Loaded
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget

STORED = Path(__file__).with_name("acceptance.json")
"""Made by benchmarks/acceptance.py."""

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
class TextKind:
    """A kind of text: mean prompt length, and a round's gain by draft size."""

    prompt: float
    gains: Mapping[DraftBudget, Gain]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Gains by kind of text, and where they come from in words."""

    kinds: Mapping[str, TextKind]
    source: str


@cache
def _stored() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))


def stored_drafters(model: Loaded) -> list[str]:
    """Return the drafters with stored acceptance for this model."""
    return list(_stored()["drafters"]) if model.path.name == _stored()["file"] else []


def stored(model: Loaded, drafter: str, sizes: Sequence[DraftBudget]) -> Acceptance | None:
    """Return a drafter's stored acceptance, None unless it covers all `sizes`."""
    if drafter not in stored_drafters(model):
        return None
    table = _stored()["drafters"][drafter]
    if any(name_of(size) not in table for size in sizes):
        return None
    kinds = {}
    for name, prompt in _stored()["prompt_tokens"].items():
        kinds[name] = TextKind(prompt, {size: Gain(*table[name_of(size)][name]) for size in sizes})
    return Acceptance(kinds, f"stored, from {_stored()['questions']} Spec-Bench questions")


def name_of(size: DraftBudget) -> str:
    """Return a draft size as --draft takes it."""
    return str(size.nodes) if size.branch == 1 else f"{size.nodes}x{size.depth}x{size.branch}"


def observe(
    model: Loaded,
    shadow: ShadowDrafter,
    sizes: Sequence[DraftBudget],
    prompts: Mapping[str, Sequence[str]],
    tokens: int,
) -> Acceptance:
    """Observe acceptance over greedy replies of at most `tokens` tokens to prompts by kind of text."""
    llm = LLM(model, shadow, sizes[-1])
    kinds: dict[str, TextKind] = {}
    for kind, texts in prompts.items():
        counts, lengths = [RoundCounts() for _ in sizes], []
        for text in texts:
            prompt = llm.prompt_ids(text)
            reply = llm.generate(prompt, Sampling(max_new_tokens=tokens))
            lengths.append(len(prompt))
            shadow.count([*prompt, *reply.token_ids], counts)
        gains = {size: count.gain for size, count in zip(sizes, counts, strict=True)}
        kinds[kind] = TextKind(sum(lengths) / len(lengths), gains)
    return Acceptance(kinds, f"observed here, over {sum(map(len, prompts.values()))} short replies")
