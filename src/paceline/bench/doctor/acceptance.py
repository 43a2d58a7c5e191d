"""Tokens per round by drafter, draft size and kind of text: stored, or observed here by shadow drafting.

Shadow drafts are scored and timed but never verified, while plain decoding writes the text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline.checkpoints.loader import Loaded
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.stack import DrafterWrapper
from paceline.llm import LLM
from paceline.sampling.parameters import Sampling
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import MIN_ROWS

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
class Gain:
    """Means per round at one draft size: `tokens`, the target's own token included, and `rows` of the verify pass, at
    least `MIN_ROWS`."""

    tokens: float
    rows: float


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
