"""Trees of a batch grow together, and each as it would alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, Chosen, Growth, pack_level
from paceline.drafters.model import SHARED, DraftModel
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Ranked
from paceline.testing import TINY, random_tensors
from paceline.types import Draft, DraftBudget, Forward, Rows, Verdict, Want
from paceline.verify.tree import MIN_ROWS
from tests.toys import ask_for

CPU = torch.device("cpu")
PROMPTS = [[1, 5, 9, 5, 9, 5, 2, 1, 5, 9], [3], [i * i % 37 for i in range(SHARED + 20)], [7, 7, 8], [4] * SHARED]


class Counted(Decoder):
    """Notes every pass."""

    def __init__(self) -> None:
        super().__init__(TINY, random_tensors(TINY, seed=9), torch.float64, CPU)
        self.passes: list[Rows] = []

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        self.passes.append(rows)
        return super().forward(rows, cache, want)


def only_even(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    """Bans so much that levels run short."""
    logits[1::2] = -torch.inf
    logits[:: len(prefix) % 3 + 2] = -torch.inf
    return logits


def no_token(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    return logits.fill_(-torch.inf)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=0.9, seed=4, rule="block"),
    Sampling(temperature=1.2, seed=5, processors=[only_even]),
    Sampling(temperature=1.0, seed=6, top_k=2, rule="rejection"),
]
BUDGETS = [
    DraftBudget(12, 4, 3),
    DraftBudget.chain(5),
    DraftBudget(20, 3, 4),
    DraftBudget.chain(0),
    DraftBudget(7, 5, 2),
]


def asks(samplings: Sequence[Sampling], budgets: Sequence[DraftBudget], texts: Sequence[Sequence[int]]) -> list[Ask]:
    together = zip(samplings, budgets, texts, strict=True)
    return [ask_for(slot, budget, sampling, text) for slot, (sampling, budget, text) in enumerate(together)]


def same(ours: Draft, theirs: Draft) -> None:
    assert ours == theirs
    assert ours.q.keys() == theirs.q.keys()
    for row, q in ours.q.items():
        torch.testing.assert_close(q, theirs.q[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("turn", range(5))
def test_a_batch_is_drafted_for_as_each_request_alone(turn: int) -> None:
    """Ragged in all things: texts, budgets, rules, and levels that bans cut short; over several rounds."""
    texts = [list(prompt) for prompt in PROMPTS]
    budgets, samplings = BUDGETS[turn:] + BUDGETS[:turn], SAMPLINGS
    together, alone = DraftModel(Counted(), 37), [DraftModel(Counted(), 37) for _ in texts]
    for slot, text in enumerate(texts):
        together.admit(slot, text)
        alone[slot].admit(slot, text)
    for commit in (1, 2, 4):
        batch = asks(samplings, budgets, texts)
        for slot, (ours, ask) in enumerate(zip(together.propose(batch), batch, strict=True)):
            same(ours, alone[slot].propose([ask])[0])
            tokens = tuple((slot + 5 * commit + i) % 37 for i in range(commit + slot % 2))
            for drafter in (together, alone[slot]):
                drafter.observe(slot, Verdict(tuple(range(1, len(tokens))), tokens), {})
            texts[slot] += tokens


def test_a_level_is_one_pass_whatever_the_batch() -> None:
    for count in (1, 3):
        model = Counted()
        drafter = DraftModel(model, 37)
        texts = [[1, 2, 3], [5] * 7, [8]][:count]
        for slot, text in enumerate(texts):
            drafter.admit(slot, text)
        drafter.propose(asks([Sampling()] * count, [DraftBudget(12, 4, 3)] * count, texts))
        starts = [(row,) * count for row in (0, 0, 3, 6)]
        assert [rows.starts for rows in model.passes] == starts, "the texts, then a pass per level but the last"
        assert all(len(rows.slots) == count and rows.tokens.numel() >= MIN_ROWS for rows in model.passes)


def test_a_long_text_is_fed_alone_before_the_others_join() -> None:
    model = Counted()
    drafter = DraftModel(model, 37)
    texts = [[1, 2, 3], [5] * 200]
    for slot, text in enumerate(texts):
        drafter.admit(slot, text)
    drafter.propose(asks([Sampling()] * 2, [DraftBudget.chain(1)] * 2, texts))
    assert [(rows.slots, rows.tokens.shape[1], rows.prefill) for rows in model.passes] == [
        ((1,), 199, True),
        ((0, 1), 3, False),
    ]


def test_a_request_that_can_draft_nothing_does_not_hold_up_the_others() -> None:
    drafter = DraftModel(Counted(), 37)
    texts = [[1, 2, 3], [4, 5], [6]]
    for slot, text in enumerate(texts):
        drafter.admit(slot, text)
    samplings = [Sampling(), Sampling(processors=[no_token]), Sampling()]
    drafts = drafter.propose(asks(samplings, [DraftBudget.chain(3), DraftBudget.chain(3), DraftBudget.chain(0)], texts))
    assert [len(draft.tokens) for draft in drafts] == [3, 0, 0]


def test_rows_of_a_level_follow_those_of_the_level_before() -> None:
    """Tree of two, fillers in the shorter one: they leave no trace, and a child finds its parent's row."""
    bushy, thin = (
        Growth(ask_for(slot, DraftBudget(9, 3, 2), Sampling(), [1, 2]), Chosen(DraftBudget(9, 3, 2)))
        for slot in range(2)
    )
    bushy.nodes.grow(ROOT, Ranked([3, 4], [1.0, 0.0]))
    thin.nodes.grow(ROOT, Ranked([5], [1.0]))
    assert bushy.descend()
    assert thin.descend()
    rows = pack_level([bushy, thin], [7, 8], [10, 20], CPU)
    assert (rows.starts, rows.counts, rows.slots, rows.lengths) == ((0, 0), (2, 1), (7, 8), (10, 20))
    assert rows.tokens.tolist() == [[3, 4], [5, 5]]
    assert rows.positions.tolist() == [[10, 10], [20, 20]]
    bushy.nodes.grow(1, Ranked([6], [1.0]))
    thin.nodes.grow(0, Ranked([7, 8], [1.0, 0.5]))
    assert bushy.descend()
    assert thin.descend()
    rows = pack_level([bushy, thin], [7, 8], [10, 20], CPU)
    assert rows.starts == (2, 1)
    assert rows.tokens.tolist() == [[6, 6], [7, 8]]
    assert rows.positions.tolist() == [[11, 11], [21, 21]]
    assert rows.parents == ((-1, -1, 1, -1), (-1, 0, 0))
    alone = pack_level([replace(thin, row_of={ROOT: -1, 0: 0})], [8], [20], CPU)
    assert (alone.tokens.shape[1], alone.counts) == (MIN_ROWS, (2,))
