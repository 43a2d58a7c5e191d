"""The rules `rejection` and `block` verify siblings in the order of their draws. Check every outcome of every draw.

In any other order, the siblings and the reply would have a different distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.base import Ask, Drafter
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.sampling.noise import DRAFT_STREAM
from paceline.sampling.parameters import Sampling
from paceline.testing.tiny import start
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import check, paths_of
from tests.support.enumerate import Script, outcomes
from tests.support.every_drafter import EVERY, KINDS, PAIRS, VOCAB

PROMPT = [1, 2, 3, 0, 1, 2, 4, 1]
TREE = DraftBudget(9, 3, 2)
CHOSEN = ("ngram", "suffix", "text")
"""Drafters that choose their tokens without random draws."""


@dataclass
class ScriptedDraws:
    """Stands in for a sampler's `Noise` while drafts are drawn.

    `drawn` and `q` map the path of a row to its draws, in order, and to the distribution [V] of the first draw.
    """

    script: Script
    drawn: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    q: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def stream(self, purpose: int, position: int, *path: int) -> ScriptedRow:
        assert purpose == DRAFT_STREAM
        return ScriptedRow(self, path)


@dataclass
class ScriptedRow:
    draws: ScriptedDraws
    path: tuple[int, ...]

    def best(self, position: int, scores: Any, tokens: Any, count: int) -> tuple[Any, Any]:
        """Draw without replacement. `Noise.best` does the same by adding noise."""
        ids = np.arange(len(scores)) if tokens is None else np.asarray(tokens)
        left = torch.zeros(VOCAB, dtype=torch.float64)
        left[torch.from_numpy(ids)] = torch.from_numpy(np.asarray(scores, np.float64)).softmax(0)
        self.draws.q[self.path] = left.clone()
        drawn = self.draws.drawn[self.path] = []
        while len(drawn) < count and left.sum() > 0:
            drawn.append(self.draws.script.token(left / left.sum()))
            left[drawn[-1]] = 0.0
        return np.array(drawn), np.zeros(len(drawn))


def check_order(draft: Draft, noise: ScriptedDraws) -> None:
    """Check the siblings of every row. Drafters that guess all depths at once draw once for all rows of a depth."""
    check(draft)
    for row, rows in paths_of(draft).items():
        path = tuple(draft.tokens[r - 1] for r in rows)
        children = [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == row]
        if children and row in draft.q:
            made = path if path in noise.drawn else next(key for key in noise.drawn if len(key) == len(path))
            assert children == noise.drawn[made][: len(children)], (
                f"below {path}: {children}, drawn {noise.drawn[made]}"
            )
            torch.testing.assert_close(draft.q[row].double(), noise.q[made])


def drafts(target: Decoder, drafter: Drafter, size: DraftBudget, temperature: float) -> Callable[[Script], Draft]:
    """Return a program that drafts once for a prompt that has been fed, and checks the draft."""
    engine = Engine(target, drafter, size)
    how = Sampling(temperature=temperature, top_k=2, rule="rejection", seed=1)
    request = start(engine, PROMPT, how, (), None)
    engine.prefill(request)

    def draft(script: Script) -> Draft:
        noise, room = ScriptedDraws(script), engine.cache.fit(request.slot, size)
        sampler = replace(request.sampler, noise=noise)  # type: ignore[arg-type]
        (made,) = drafter.propose([Ask(request.slot, request.prefix, room, sampler)])
        check_order(made, noise)
        return made

    return draft


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [pytest.param(*pair, marks=[] if pair[0] == "attention" else pytest.mark.slow) for pair in PAIRS],
)
def test_siblings_are_in_the_order_of_their_draws(kind: str, drafter: str) -> None:
    target = KINDS[kind](0)
    made = EVERY[drafter](target)
    for size, temperature in ((DraftBudget.chain(3), 1.0), (TREE, 0.7), (TREE, 2.0)):
        found = outcomes(_hashable(drafts(target, made, size, temperature)))
        assert (len(found) > 1) is (drafter not in CHOSEN)


def _hashable(draft: Callable[[Script], Draft]) -> Callable[[Script], tuple[Sequence[int], Sequence[int]]]:
    def run(script: Script) -> tuple[Sequence[int], Sequence[int]]:
        made = draft(script)
        return made.tokens, made.parents

    return run


def test_an_order_that_depends_on_the_draws_is_noticed() -> None:
    """Early exit once listed siblings in another order than it had drawn them."""
    target = KINDS["attention"](0)
    drafter = EVERY["early exit"](target)
    honest = drafter.propose

    def reversed_siblings(asks: Sequence[Ask]) -> list[Draft]:
        (made,) = honest(asks)
        first, second = made.tokens[:2]
        rows = {1: 2, 2: 1}
        parents = tuple(rows.get(parent, parent) for parent in made.parents)
        q = {rows.get(row, row): p for row, p in made.q.items()}
        return [replace(made, tokens=(second, first, *made.tokens[2:]), parents=parents, q=q)]

    drafter.propose = reversed_siblings  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="drawn"):
        outcomes(_hashable(drafts(target, drafter, TREE, 2.0)))
