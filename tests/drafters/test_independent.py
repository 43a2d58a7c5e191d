"""Drafts from independent guesses per depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.independent import draft_independently, fixed_tree
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix
from paceline.types import Draft, DraftBudget, Tap, Verdict
from paceline.verify.tree import check, depths
from tests.support.bigram import Bigram
from tests.support.cover import some
from tests.support.text_distribution import CHAIN, TREE, chi_square
from tests.support.toys import ask_for

PROMPT = [1, 2, 3]


def logits(depth: int = 4, vocab: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def ask(sampling: Sampling) -> Ask:
    return ask_for(0, DraftBudget.chain(4), sampling, PROMPT)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "budget",
    [DraftBudget(9, 4, 3), DraftBudget(30, 3, 2), DraftBudget(5, 2, 4), DraftBudget.chain(4), DraftBudget(2, 4, 3)],
)
def test_the_most_likely_nodes_are_drafted(budget: DraftBudget, seed: int) -> None:
    """Compare with all possible nodes. The probability of a path is the product over its tokens."""
    rows = logits(seed=seed)
    draft = draft_independently(ask(Sampling()), budget, rows)
    check(draft)
    chances = rows.softmax(-1)
    best = rows.argsort(-1, descending=True)[:, : budget.branch].tolist()
    nodes = [path for depth in range(1, budget.depth + 1) for path in product(*best[:depth])]
    nodes.sort(key=lambda path: -float(torch.stack([chances[i, token] for i, token in enumerate(path)]).prod()))
    assert paths(draft) == set(nodes[: budget.nodes])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_equals_the_targets_choices_from_the_same_rows(temperature: float) -> None:
    """The noise at each position is the target's own noise."""
    rows = logits(seed=3)
    sampling = Sampling(temperature=temperature, top_k=5, seed=3)
    sampler = sampling.sampler()
    draft = draft_independently(ask(sampling), DraftBudget.chain(4), rows)
    path: list[int] = []
    for row in rows:
        path.append(sampler.choose(Prefix(PROMPT, path), row))
    assert draft == Draft.chain(path)
    assert draft_independently(ask(sampling), DraftBudget.chain(2), rows) == Draft.chain(path[:2])


def test_processors_see_the_best_path() -> None:
    def climbing(prefix: Prefix, row: torch.Tensor) -> torch.Tensor:
        row[: prefix.tokens[-1] + 1] = -torch.inf
        return row

    climbs = ask(Sampling(processors=[climbing]))
    draft = draft_independently(climbs, DraftBudget.chain(4), logits())
    assert list(draft.tokens) == sorted(set(draft.tokens))
    assert draft.tokens[0] > PROMPT[-1]
    dead = torch.full((4, 12), 0.0)
    dead[0, 11] = 9.0
    assert draft_independently(climbs, DraftBudget(9, 4, 2), dead).tokens[0] == 11, (
        "and where nothing is left the draft ends"
    )
    assert max(depths(draft_independently(climbs, DraftBudget(9, 4, 2), dead).parents)) == 1


def test_rows_that_are_not_finite_end_the_draft() -> None:
    rows = logits()
    rows[2] = torch.nan
    for rule in ("match", "rejection"):
        drawing = ask(Sampling(temperature=0.9, seed=1, rule=rule))  # type: ignore[arg-type]
        assert max(depths(draft_independently(drawing, DraftBudget(12, 4, 2), rows).parents)) == 2


class Guess(Drafter):
    """Guesses each depth from the table of `tests.support.bigram`, from only the pending token."""

    def __init__(self, model: Bigram, vocab_size: int) -> None:
        chances = [model.table.softmax(-1)]
        for _ in range(2):
            chances.append(chances[-1] @ chances[0])
        self._rows = torch.stack(chances).log()

    def admit(self, slot: int, prompt: Sequence[int]) -> None: ...

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, torch.Tensor]) -> None: ...

    def release(self, slot: int) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [draft_independently(ask, ask.budget, self._rows[:, ask.last]) for ask in asks]


@some("rule", ["rejection", "block"], fast=["block"])
def test_texts_have_the_targets_distribution(rule: str) -> None:
    assert chi_square(rule, TREE, Guess) < 1


@pytest.mark.slow
def test_a_q_of_another_depth_is_noticed() -> None:
    class Mistaken(Guess):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            wrong = self._rows[1, asks[0].last].exp()
            return [replace(draft, q=dict.fromkeys(draft.q, wrong)) for draft in super().propose(asks)]

    assert chi_square("block", CHAIN, Mistaken) > 1


@pytest.mark.parametrize(
    "order", [((0,), (0, 0), (0, 0, 0), (0, 0, 1)), ((0,), (1,), (1, 0), (1, 0, 0), (1, 0, 1), (0, 0))]
)
def test_drawn_trees_branch_no_more_below_an_only_child(order: tuple[tuple[int, ...], ...]) -> None:
    """Otherwise, the draws and a path-dependent processor would decide whether the block rule sees a chain."""
    nodes = fixed_tree(DraftBudget(8, 3, 2), order, True).nodes
    children = Counter(parent for parent, _, _ in nodes)
    for row, (parent, _, _) in enumerate(nodes, 1):
        assert children[parent] > 1 or children[row] <= 1
    assert len(nodes) == len(order) - 1
    assert len(fixed_tree(DraftBudget(8, 3, 2), order, False).nodes) == len(order), "where nothing is drawn all stay"
