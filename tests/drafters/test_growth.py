"""Trees of a batch grow together, and each tree is the same as without the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.drafters.base import Ask
from paceline.drafters.growth import ROOT, ScoredTree, TreeGrowth, pack_level
from paceline.drafters.model import MAX_READ, MAX_SHARED_PASS, DraftModel
from paceline.engine.draft_length import Controller
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Ranked, RuleName
from paceline.testing import TINY, random_tensors, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget, Forward, Rows, Verdict, Want
from paceline.verify.tree import MIN_ROWS
from tests.support.controlled import fixed_plan
from tests.support.cover import cover
from tests.support.toys import ask_for, toy_target

CPU = torch.device("cpu")
PROMPTS = [
    [1, 5, 9, 5, 9, 5, 2, 1, 5, 9],
    [3],
    [i * i % 37 for i in range(MAX_SHARED_PASS + 20)],
    [7, 7, 8],
    [4] * MAX_SHARED_PASS,
]


class Counted(Decoder):
    """Records every pass."""

    def __init__(self) -> None:
        super().__init__(TINY, random_tensors(TINY, seed=9), torch.float64, CPU)
        self.passes: list[Rows] = []

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        self.passes.append(rows)
        return super().forward(rows, cache, want)


def only_even(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    """Bans so many tokens that levels have fewer nodes."""
    logits[1::2] = -torch.inf
    logits[:: len(prefix) % 3 + 2] = -torch.inf
    return logits


def no_token(prefix: Prefix, logits: torch.Tensor) -> torch.Tensor:
    return logits.fill_(-torch.inf)


_CHAIN, _SAMPLING = DraftBudget.chain(6), Sampling()
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
def test_a_batch_is_drafted_as_single_requests(turn: int) -> None:
    """Requests differ in text, budget and rule, and bans shorten levels. There are several rounds."""
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


def test_a_long_text_is_read_in_parts_while_the_others_draft() -> None:
    model = Counted()
    drafter = DraftModel(model, 37)
    texts = [[1, 2, 3], [5] * (MAX_READ + 100)]
    for slot, text in enumerate(texts):
        drafter.admit(slot, text)
    found = []
    for _ in range(2):
        drafts = drafter.propose(asks([Sampling()] * 2, [DraftBudget.chain(1)] * 2, texts))
        passes = [(rows.slots, rows.counts) for rows in model.passes]
        found.append((passes, [(len(draft.tokens), draft.unread) for draft in drafts]))
        model.passes.clear()
    assert found == [
        ([((1,), (MAX_READ,)), ((0,), (3,))], [(1, 0), (0, 100)]),
        ([((1,), (99,)), ((0, 1), (1, 1))], [(1, 0), (1, 0)]),
    ]


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_a_text_that_depends_on_drafts_waits_until_the_prompt_is_read(rule: RuleName) -> None:
    """Otherwise, the text would depend on the prefill of other requests."""
    model, text = Counted(), [5] * (MAX_READ + 100)
    drafter = DraftModel(model, 37)
    drafter.admit(0, text)
    (draft,) = drafter.propose(asks([Sampling(rule=rule, temperature=1.0)], [DraftBudget.chain(1)], [text]))
    assert draft.tokens
    assert [sum(rows.counts) for rows in model.passes] == [MAX_READ, 99, 1]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_no_pass_of_a_draft_model_has_more_rows_than_the_limit(rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.model.MAX_READ", 40)
    model, target = Counted(), tiny_target()
    prompts = [[i * i % 37 for i in range(200)], [1, 2, 3], [*range(37)] * 5]
    hows = [Sampling(max_new_tokens=20, ignore_eos=True, seed=5, temperature=0.7, rule=rule)] * 3
    engine = Engine(target, DraftModel(model, 37), DraftBudget.chain(2))
    texts = [reply[0] for reply in run_together(engine, prompts, hows)]
    assert max(max(rows.counts) for rows in model.passes) == 40
    assert sum(len(rows.slots) == 3 for rows in model.passes) > 5, "in the end all of them draft"
    if rule == "match":
        assert texts == [reply[0] for reply in run_together(Engine(target), prompts, hows)]


def test_a_request_that_can_draft_nothing_does_not_hold_up_the_others() -> None:
    drafter = DraftModel(Counted(), 37)
    texts = [[1, 2, 3], [4, 5], [6]]
    for slot, text in enumerate(texts):
        drafter.admit(slot, text)
    samplings = [Sampling(), Sampling(processors=[no_token]), Sampling()]
    drafts = drafter.propose(asks(samplings, [DraftBudget.chain(3), DraftBudget.chain(3), DraftBudget.chain(0)], texts))
    assert [len(draft.tokens) for draft in drafts] == [3, 0, 0]


def test_rows_of_a_level_follow_the_rows_of_the_level_before() -> None:
    """There are two trees, and the shorter one has padding rows without effect. Children find their parents' rows."""
    bushy, thin = (
        TreeGrowth(ask_for(slot, DraftBudget(9, 3, 2), Sampling(), [1, 2]), ScoredTree(DraftBudget(9, 3, 2)))
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


def test_second_choices_are_drafted_if_they_are_worth_their_rows() -> None:
    """Nodes must be likelier than the price, and a second node of a level gets children only if these are likely."""

    def tree(price: float) -> ScoredTree:
        nodes = ScoredTree(DraftBudget(7, 3, 3), price=price)
        nodes.grow(ROOT, Ranked([3, 4, 5], [math.log(p) for p in (0.5, 0.4, 0.1)]))
        return nodes

    assert tree(0.0).level(0) == [0, 1, 2]
    assert tree(0.05).level(0) == [0, 1], "three children of node 2 would be accepted in 7% of cases"
    assert tree(0.2).level(0) == [0]
    assert tree(0.4).level(0) == []
    assert [tree(price).draft().tokens for price in (0.05, 0.2, 0.45, 0.6)] == [(3, 4, 5), (3, 4), (3,), ()]


def test_a_draft_model_drafts_a_chain_where_a_tree_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some draft models can feed only chains. With rules that draw, the shape of a tree would be fixed."""
    drafter = DraftModel(Counted(), 37)
    drafter.admit(0, [1, 2, 3])

    def draft(rule: RuleName, budget: DraftBudget) -> Draft:
        ask = ask_for(0, budget, Sampling(temperature=0.9, seed=1, rule=rule), [1, 2, 3])
        return drafter.propose([ask])[0]

    def is_chain(draft: Draft) -> bool:
        return draft == Draft.chain(draft.tokens)

    assert not is_chain(draft("match", drafter.draft))
    assert is_chain(draft("rejection", drafter.draft))
    assert not is_chain(draft("rejection", DraftBudget(9, 3, 3))), "a tree that was asked for"
    monkeypatch.setattr(drafter._cache, "fit", lambda slot, budget: DraftBudget.chain(budget.depth))
    assert is_chain(draft("match", drafter.draft))


def drafted(pace: float, seconds: float, sampling: Sampling = _SAMPLING, draft: DraftBudget = _CHAIN) -> int:
    """Return the number of drafted tokens if a level takes this many seconds."""
    drafter = DraftModel(Counted(), 37)
    drafter.admit(0, [1, 2, 3])
    drafter._level_seconds = seconds
    ask = ask_for(0, draft, sampling, [1, 2, 3])
    return len(drafter.propose([replace(ask, pace=pace)])[0].tokens)


@pytest.mark.parametrize("draft", [_CHAIN, DraftBudget(20, 6, 3)], ids=["chain", "tree"])
def test_a_draft_ends_before_an_unprofitable_level(draft: DraftBudget) -> None:
    """The more a level costs, the shorter the draft. A level that costs more than a token is never drafted."""
    lengths = [drafted(10.0, seconds, draft=draft) for seconds in (0.0, 0.02, 0.05, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == draft.nodes
    assert lengths[-1] <= draft.branch, "the first level comes with reading the text"
    assert lengths[0] > lengths[-1]


def test_drafts_are_whole_until_something_was_measured() -> None:
    assert drafted(0.0, 1.0) == _CHAIN.nodes


def test_a_request_too_unlikely_for_its_row_leaves_the_batch() -> None:
    drafter = DraftModel(Counted(), 37)
    texts = [[1, 2, 3], [4, 5]]
    for slot, text in enumerate(texts):
        drafter.admit(slot, text)
    batch = asks([Sampling()] * 2, [_CHAIN] * 2, texts)
    lengths = [len(d.tokens) for d in drafter.propose([batch[0], replace(batch[1], price=1.0)])]
    assert lengths == [_CHAIN.nodes, 0]


@cover(temperature=[0.0, 1.0], draft={"controller": None, "fixed": _CHAIN}, together=[("temperature",), ("draft",)])
def test_stopping_a_draft_early_does_not_change_the_text(
    temperature: float, draft: DraftBudget | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft sizes and stops are random, as with random timing."""
    turns = itertools.count()
    whims = lambda self, each, together: fixed_plan(self, each, self.sizes[next(turns) % len(self.sizes)])  # noqa: E731
    monkeypatch.setattr(Controller, "plan", whims)

    class Whim(DraftModel):
        stops = 0

        def _pays(self, growths: Sequence[TreeGrowth]) -> bool:
            assert all(growth.ask.pace >= 0 for growth in growths)
            self.stops += 1
            return self.stops % 3 != 0

    target, sampling = toy_target(layers=1), Sampling(max_new_tokens=60, temperature=temperature, seed=2)
    whim = Whim(toy_target(seed=9, layers=1), 37)
    assert run(target, [1, 5, 9], sampling, whim, draft)[0] == run(target, [1, 5, 9], sampling)[0]
    assert whim.stops > 0


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_drafters_learn_the_pace_but_not_under_rules_that_draw(rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = set()

    class Noting(DraftModel):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            paces.update(ask.pace for ask in asks)
            return super().propose(asks)

    most = lambda self, each, together: fixed_plan(self, each, self.sizes[-1], pace=5.0)  # noqa: E731
    monkeypatch.setattr(Controller, "plan", most)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=2, rule=rule)
    run(toy_target(layers=1), [1, 5, 9], sampling, Noting(toy_target(layers=1), 37), None)
    assert paces == ({5.0} if rule == "match" else {0.0})
