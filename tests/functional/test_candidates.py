from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.layout import ancestors
from paceline.errors import InvalidOption
from paceline.functional import CandidateTree, TreeConfig, attention_bias, inputs, mask, paths, positions, topk
from paceline.types import Draft
from paceline.verify.tree import depths, pack
from tests.support.draft_batches import batches, drafts_of, padded, tree_of
from tests.support.trees import path_to

SMALL = tree_of([Draft((1, 2, 3), (0, 0, 1)), Draft((5,), (0,))])


@given(batches)
def test_a_batch_of_trees_holds_what_each_draft_says(batch: list[Draft]) -> None:
    tree = tree_of(batch)
    assert drafts_of(tree) == batch
    assert tree.counts.tolist() == [len(d.tokens) for d in batch]
    assert tree.depths.equal(padded([[*depths(d.parents)[1:]] for d in batch]).clamp(min=0))
    assert tree.max_depth == max(max(depths(d.parents)) for d in batch)
    assert tree.max_branch == max((d.parents.count(p) for d in batch for p in d.parents), default=0)


@given(batches)
def test_positions_inputs_and_mask_equal_single_requests(batch: list[Draft]) -> None:
    tree = tree_of(batch)
    rows = tree.tokens.shape[1] + 1
    last, lengths = torch.arange(len(batch)) + 50, 10 * torch.arange(len(batch)) + 3
    packed = pack(last.tolist(), batch, range(len(batch)), lengths.tolist(), torch.device("cpu"))
    assert inputs(tree, last).equal(packed.tokens[:, :rows])
    assert positions(tree, lengths).equal(packed.positions[:, :rows])
    assert mask(tree).equal(torch.stack([ancestors(p[:rows]) for p in packed.parents]))


@given(batches)
def test_paths_lead_from_the_first_node_to_each_row(batch: list[Draft]) -> None:
    tree = tree_of(batch)
    for draft, found in zip(batch, paths(tree), strict=True):
        for row, path in enumerate(found.tolist()):
            real = path_to(draft, row)[-2::-1] if row <= len(draft.tokens) else []
            assert path == real + [-1] * (tree.max_depth - len(real))


@given(batches)
def test_scores_are_the_sums_of_log_probabilities_along_the_path(batch: list[Draft]) -> None:
    steps = -torch.rand(tree_of(batch).tokens.shape, generator=torch.Generator().manual_seed(0))
    tree = CandidateTree.of(tree_of(batch).tokens, tree_of(batch).parents, steps)
    for b, draft in enumerate(batch):
        for node in range(len(draft.tokens)):
            above = sum(float(steps[b, row - 1]) for row in path_to(draft, node + 1)[:-1])
            assert math.isclose(float(tree.scores[b, node]), above, rel_tol=1e-5)
        assert (tree.scores[b, len(draft.tokens) :] == -torch.inf).all()


@given(batches, st.integers(0, 3))
def test_the_attention_bias_shows_the_text_and_the_ancestors(batch: list[Draft], spare: int) -> None:
    tree = tree_of(batch)
    rows = tree.tokens.shape[1] + 1
    lengths = torch.tensor([7, 0, 3, 5][: len(batch)])
    bias = attention_bias(tree, lengths, 7 + rows + spare, torch.float64)
    assert bias.shape == (len(batch), 1, rows, 7 + rows + spare)
    seen = bias[:, 0] == 0
    assert ((bias[:, 0] == -torch.inf) | seen).all()
    for b, length in enumerate(lengths.tolist()):
        assert seen[b, :, :length].all()
        assert seen[b, :, length : length + rows].equal(mask(tree)[b])
        assert not seen[b, :, length + rows :].any()


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([[1, 2]], [[0]]),
        ([[1, 2]], [[0, 3]]),
        ([[1]], [[1]]),
        ([[1, 1]], [[0, 0]]),
        ([[1]], [[-1]]),
        ([[-1]], [[0]]),
        ([[-1, 1]], [[-1, 0]]),
        ([[1.0]], [[0.0]]),
        ([1], [0]),
    ],
)
def test_invalid_trees_are_refused(tokens: list[Any], parents: list[Any]) -> None:
    with pytest.raises(InvalidOption):
        CandidateTree.of(torch.tensor(tokens), torch.tensor(parents))


def test_equal_tokens_below_different_rows_are_a_tree() -> None:
    assert CandidateTree.of(torch.tensor([[1, 2, 1]]), torch.tensor([[0, 0, 1]])).max_branch == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"branch": 0},
        {"branch": 1.5},
        {"branch": True},
        {"depth": 0},
        {"depth": "3"},
        {"max_nodes": 0},
        {"max_nodes": -4},
        {"confidence": 1.5},
        {"confidence": -0.1},
        {"confidence": math.nan},
        {"confidence": True},
        {"confidence": "high"},
        {"confidence": torch.tensor([0.5, 2.0])},
        {"confidence": torch.tensor([0.5, math.nan])},
    ],
)
def test_a_configuration_checks_itself(wrong: dict[str, Any]) -> None:
    fine: dict[str, Any] = {"branch": 2, "depth": 3, "max_nodes": 8}
    TreeConfig(**fine, confidence=0.0)
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        TreeConfig(**fine | wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda: positions(SMALL, torch.tensor([1])),
        lambda: positions(SMALL, torch.tensor([1.0, 2.0])),
        lambda: inputs(SMALL, torch.tensor([[1, 2]])),
        lambda: attention_bias(SMALL, torch.tensor([1, 2]), 3),
        lambda: CandidateTree.of(SMALL.tokens, SMALL.parents, torch.zeros(2, 2)),
        lambda: topk(torch.zeros(2, 3), 4),
        lambda: topk(torch.zeros(2, 3), 0),
        lambda: topk(torch.zeros(2, 3), True),
        lambda: topk(torch.zeros(2, 3, dtype=torch.int64), 1),
        lambda: topk(torch.tensor(1.0), 1),
    ],
)
def test_wrong_shapes_and_kinds_are_refused(call: Any) -> None:
    with pytest.raises(InvalidOption):
        call()


LOWEST = torch.finfo(torch.float32).min
NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf, LOWEST, -1.5, -0.0, 0.0, 0.5, 2.0])


def rank(x: float) -> float:
    """Return a sort key: NaN comes after -inf."""
    return -math.inf if math.isnan(x) else -1e300 if x == -math.inf else x


@given(st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 6))
def test_nan_ranks_last_behind_minus_infinity(rows: list[list[float]], k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        found = topk(torch.tensor(rows, dtype=dtype), k)
        assert found.nan.tolist() == [any(map(math.isnan, row)) for row in rows]
        for row, values, indices in zip(rows, found.values.tolist(), found.indices.tolist(), strict=True):
            assert len({*indices}) == k
            assert [rank(row[i]) for i in indices] == sorted(map(rank, row), reverse=True)[:k]
            assert [rank(v) for v in values] == [rank(row[i]) for i in indices]


@given(st.permutations([0.0, -0.0, 0.0, -0.0]))
def test_negative_zero_equals_zero(row: list[float]) -> None:
    assert topk(torch.tensor(row), 2).indices.equal(topk(torch.zeros(4), 2).indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_too(dtype: torch.dtype) -> None:
    row = torch.tensor([-torch.inf, 3.0, torch.nan, torch.finfo(dtype).min, -2.0], dtype=dtype)
    found = topk(row, 5)
    assert found.indices.tolist() == [1, 4, 3, 0, 2]
    assert found.values.dtype == dtype
    assert bool(found.nan)
