from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.functional import (
    CandidateTree,
    Level,
    TreeConfig,
    cartesian,
    from_choices,
    from_heads,
    grow,
    paths,
    sample,
)
from paceline.types import Draft
from paceline.verify.tree import check, depths, from_paths
from tests.support.cover import some
from tests.support.draft_batches import chi_square, drafts_of

CONFIGS = st.builds(
    TreeConfig,
    branch=st.integers(1, 4),
    depth=st.integers(1, 4),
    max_nodes=st.integers(1, 20),
    confidence=st.sampled_from([None, 0.0, 0.02, 0.2]),
)
MULTIPLIERS = torch.tensor([7, 5, 3, 2])


class Path:
    """A drafter with logits that depend on every token of the path, which it reads through `visible`."""

    def __init__(self, seed: int, vocab: int = 6) -> None:
        self.table = torch.randn(50, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
        self.fed: list[Tensor] = []

    def __call__(self, level: Level) -> Tensor:
        self.fed.append(level.tokens * MULTIPLIERS[level.depth])
        return self.table[(level.visible * torch.cat(self.fed, 1)[:, None]).sum(2)]

    def after(self, path: tuple[int, ...]) -> Tensor:
        """Return the log-probabilities after a path, by definition."""
        key = sum(int(MULTIPLIERS[d]) * token for d, token in enumerate(path, 1)) if path else 0
        return self.table[key].log_softmax(-1)

    def root(self, batch: int) -> Tensor:
        return self.table[:1].expand(batch, -1)


def token_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return, for every row, the tokens on the path from the first node."""
    out: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        out.append((*out[parent], token))
    return out


def eagle2(drafter: Path, config: TreeConfig) -> dict[tuple[int, ...], float]:
    """Apply the rule in plain Python to one request. Return path -> log-probability."""
    floor = math.log(config.confidence) if config.confidence else -math.inf
    level, grown = {(): 0.0}, {}
    for _ in range(config.depth):
        below = {}
        for path, score in level.items():
            steps = drafter.after(path)
            for token in steps.topk(config.branch).indices.tolist():
                if score + float(steps[token]) >= floor:
                    below[(*path, token)] = score + float(steps[token])
        grown |= below
        level = dict(sorted(below.items(), key=lambda node: -node[1])[: config.branch])
    return dict(sorted(grown.items(), key=lambda node: -node[1])[: config.max_nodes])


@given(CONFIGS, st.integers(0, 100))
def test_grow_keeps_the_likeliest_of_what_the_likeliest_have_below(config: TreeConfig, seed: int) -> None:
    tree = grow(Path(seed), Path(seed).root(2), config)
    expected = eagle2(Path(seed), config)
    for b, draft in enumerate(drafts_of(tree)):
        check(draft)
        found = token_paths(draft)[1:]
        assert {*found} == {*expected}
        for node, path in enumerate(found):
            assert float(tree.scores[b, node]) == pytest.approx(expected[path])
            assert float(tree.log_probs[b, node]) == pytest.approx(float(Path(seed).after(path[:-1])[path[-1]]))
        assert tree.depths[b, : len(found)].tolist() == depths(draft.parents)[1:]
    assert tree.tokens.shape[1] == min(config.max_nodes, config.branch + (config.depth - 1) * config.branch**2)
    assert not tree.broken.any()


@given(CONFIGS, st.integers(0, 100))
def test_sampled_trees_stay_within_their_configuration(config: TreeConfig, seed: int) -> None:
    tree, q = sample(Path(seed), Path(seed).root(3), config, temperature=0.8)
    for b, draft in enumerate(drafts_of(tree)):
        check(draft)
        assert len(draft.tokens) <= config.max_nodes
        assert max(depths(draft.parents)) <= config.depth
        assert all(draft.parents.count(p) <= config.branch for p in draft.parents)
        for row, path in enumerate(token_paths(draft)):
            if row in draft.parents:
                warm = (Path(seed).after(path) / 0.8).softmax(-1)
                assert q[b, row].allclose(warm)
                assert row == 0 or float(tree.scores[b, row - 1].exp()) >= (config.confidence or 0.0)
        assert not q[b, len(draft.tokens) + 1 :].any()


@some("batch", [2_000, 10_000], fast=["2000"])
def test_siblings_come_in_the_order_of_draws_without_replacement(batch: int) -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)
    tree, _ = sample(never, p.log().expand(batch, 4), TreeConfig(2, 1, 2), generator=generator)
    pairs = torch.zeros(4, 4).index_put_(tuple(tree.tokens.T), torch.ones(batch), accumulate=True)
    expected = p[:, None] * p / (1 - p[:, None])
    assert chi_square(pairs, expected.fill_diagonal_(0.0)) < 4


def test_impossible_candidates_do_not_change_the_q_of_the_others() -> None:
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    root = torch.tensor([[-torch.inf, -torch.inf, 0.0], [0.0, -torch.inf, -torch.inf]])
    tree, q = sample(lambda level: table[level.tokens], root, TreeConfig(2, 2, 6))
    assert [draft.parents for draft in drafts_of(tree)] == [(0, 1, 1), (0, 1, 1)]
    assert q[:, 0].equal(root.softmax(-1))
    assert q[:, 1].allclose(table[[2, 0]].softmax(-1))


def never(level: Level) -> Tensor:
    raise AssertionError("the drafter was asked")


def test_confidence_is_each_requests_own() -> None:
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def tree(confidence: float | Tensor | None) -> CandidateTree:
        return grow(lambda level: table[level.tokens], table[:3], TreeConfig(3, 3, 12, confidence))

    each = [None, 0.05, 0.9]
    mixed = drafts_of(tree(torch.tensor([x or 0.0 for x in each])))
    assert mixed == [drafts_of(tree(x))[b] for b, x in enumerate(each)]
    assert len(mixed[0].tokens) == 12
    assert 0 < len(mixed[1].tokens) < 12
    assert mixed[2] == Draft()


def test_a_row_that_is_not_sure_enough_is_not_live() -> None:
    asked = []

    def step(level: Level) -> Tensor:
        asked.append(level.live.tolist())
        assert level.tokens[~level.live].eq(0).all()
        return torch.zeros(2, level.tokens.shape[1], 4)

    root = torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 0]])
    tree = grow(step, root, TreeConfig(2, 3, 6, 0.5))
    assert asked == [[[True, False], [False, False]]], "and where none is live, the drafter is not asked"
    assert tree.counts.tolist() == [1, 0]


def test_hidden_states_of_the_chosen_parents_are_handed_on() -> None:
    generator = torch.Generator().manual_seed(4)
    embed, mix, out = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((7, 5), (5, 5), (5, 7)))

    def state(token: Tensor, above: Tensor) -> Tensor:
        return torch.tanh(embed[token] + above @ mix)

    def step(level: Level) -> Tensor:
        assert level.states is not None
        return state(level.tokens, level.states)

    root = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    tree = grow(step, root, TreeConfig(3, 4, 14), head=lambda states: states @ out)
    for b, draft in enumerate(drafts_of(tree)):
        for node, path in enumerate(token_paths(draft)[1:]):
            above = root[b]
            for token in path[:-1]:
                above = state(torch.tensor(token), above)
            assert float(tree.log_probs[b, node]) == pytest.approx(float((above @ out).log_softmax(-1)[path[-1]]))
    # Without a head, there are none.
    grow(lambda level: torch.zeros(3, 2, 5) if level.states is None else never(level), root, TreeConfig(2, 2, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_reported_and_never_proposed(bad: float) -> None:
    root = torch.zeros(4, 5)
    root[1, 2] = bad
    root[2] = bad
    root[3, :4] = -math.inf

    def step(level: Level) -> Tensor:
        # Only request 0 has NaN here. The other requests have no live rows, or valid ones.
        logits = torch.zeros(4, level.tokens.shape[1], 5)
        logits[2] = bad
        logits[3].masked_fill_(~level.live[3, :, None], bad)
        return logits

    for tree in (grow(step, root, TreeConfig(5, 2, 30)), sample(step, root, TreeConfig(5, 2, 30))[0]):
        assert tree.broken.tolist() == [False, True, True, False]
        assert tree.counts.tolist() == [30, 24, 0, 6]
        first = [sorted(t for t, p in zip(d.tokens, d.parents, strict=True) if p == 0) for d in drafts_of(tree)]
        assert first == [[0, 1, 2, 3, 4], [0, 1, 3, 4], [], [4]]
        assert not tree.scores.isnan().any()


def test_nan_in_the_depths_of_one_request_is_reported_too() -> None:
    tree = grow(
        lambda level: torch.where(level.tokens[..., None] == 1, math.nan, torch.zeros(2, 2, 3)),
        torch.tensor([[0.0, 5.0, 1.0], [5.0, -9.0, 1.0]]),
        TreeConfig(2, 2, 6),
    )
    assert tree.broken.tolist() == [True, False]
    assert drafts_of(tree)[0].parents == (0, 0, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_grows_the_tree_of_the_same_numbers(dtype: torch.dtype) -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(2)).to(dtype)
    small, wide = (grow(lambda level, t=t: t[level.tokens], t, TreeConfig(3, 3, 9)) for t in (table, table.float()))  # type: ignore[misc]
    assert drafts_of(small) == drafts_of(wide)
    assert small.scores.dtype == torch.float32


def test_parallel_heads_grow_like_a_drafter_that_only_sees_depth() -> None:
    heads = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tree = from_heads(heads, TreeConfig(6, 3, 10))
    log_probs = heads.log_softmax(-1)
    for b, draft in enumerate(drafts_of(tree)):
        every = {
            path: sum(float(log_probs[b, d, t]) for d, t in enumerate(path))
            for depth in (1, 2, 3)
            for path in product(range(6), repeat=depth)
        }
        assert {*token_paths(draft)[1:]} == {*sorted(every, key=every.__getitem__, reverse=True)[:10]}


def test_choices_are_ranks_of_the_heads() -> None:
    heads = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(3))
    choices = [(1,), (0, 0), (0, 2, 1)]
    tree = from_choices(heads, choices)
    order = heads.argsort(-1, descending=True)
    log_probs = heads.log_softmax(-1)
    for b, draft in enumerate(drafts_of(tree)):
        spelled = [tuple(int(order[b, d, rank]) for d, rank in enumerate(choice)) for choice in choices]
        assert draft == from_paths(spelled)
        for node, path in enumerate(token_paths(draft)[1:]):
            score = sum(float(log_probs[b, d, t]) for d, t in enumerate(path))
            assert float(tree.scores[b, node]) == pytest.approx(score, rel=1e-5)
    assert paths(tree).shape == (3, 6, 3)


def test_a_request_lacks_the_choices_that_its_heads_cannot_make() -> None:
    heads = torch.zeros(3, 2, 4)
    heads[0, 1, 1:] = -math.inf
    heads[1, 0, :] = math.nan
    heads[2, 0, 3] = math.nan
    tree = from_choices(heads, cartesian(4, 2))
    assert tree.counts.tolist() == [8, 0, 9]
    assert tree.broken.tolist() == [False, True, True]
    for draft in drafts_of(tree):
        check(draft)
    assert drafts_of(tree)[0].parents == (0, 1, 0, 3, 0, 5, 0, 7)


def test_cartesian_is_every_combination() -> None:
    assert cartesian(2, 3) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_choice_may_name_the_last_rank_of_the_vocabulary() -> None:
    tree = from_choices(torch.tensor([[[0.0, 3.0, 2.0, 1.0]]]), [(3,)])
    assert tree.tokens.flatten().tolist()[-1] == 0


ROOT = torch.zeros(2, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: grow(never, ROOT, TreeConfig(6, 2, 4)),
        lambda: grow(never, ROOT[0], TreeConfig(2, 2, 4)),
        lambda: grow(never, ROOT.long(), TreeConfig(2, 2, 4)),
        lambda: grow(never, ROOT, TreeConfig(2, 2, 4, torch.tensor([0.1]))),
        lambda: grow(never, ROOT, TreeConfig(2, 2, 4, torch.tensor([0.1] * 3)), head=never),  # type: ignore[arg-type]
        lambda: grow(lambda level: ROOT, ROOT, TreeConfig(2, 2, 4)),
        lambda: grow(lambda level: torch.zeros(2, 3, 5), ROOT, TreeConfig(2, 2, 4)),
        lambda: sample(never, ROOT, TreeConfig(2, 2, 4), temperature=-1.0),
        lambda: sample(never, ROOT, TreeConfig(2, 2, 4), temperature=torch.ones(3)),
        lambda: sample(never, ROOT, TreeConfig(2, 2, 4), head=never, temperature=1e-9),  # type: ignore[arg-type]
        lambda: from_heads(torch.zeros(2, 3, 5), TreeConfig(2, 4, 8)),
        lambda: from_heads(torch.zeros(2, 5), TreeConfig(2, 1, 8)),
        lambda: from_choices(torch.zeros(2, 3, 5), []),
        lambda: from_choices(torch.zeros(2, 3, 5), [()]),
        lambda: from_choices(torch.zeros(2, 3, 5), [(0, -1)]),
        lambda: from_choices(torch.zeros(2, 3, 5), [(0, 0.5)]),  # type: ignore[list-item]
        lambda: from_choices(torch.zeros(2, 3, 5), [(0, 5)]),
        lambda: from_choices(torch.zeros(2, 3, 5), [(0, 0, 0, 0)]),
    ],
)
def test_wrong_arguments_are_refused_before_the_drafter_is_asked(call: Any) -> None:
    with pytest.raises(InvalidOption):
        call()
