from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import InvalidOption
from paceline.functional import Accepted, append, gather_kv_, verify_greedy
from paceline.types import Draft
from tests.support.draft_batches import tree_of

TREE = tree_of([Draft((4, 5, 6, 7), (0, 0, 2, 3)), Draft((4,), (0,)), Draft()])
LENGTHS = torch.tensor([1, 3, 0])


def accepted(*choices: int) -> Accepted:
    """Return the verdicts if the target chooses these tokens after rows 0, 1, 2... of every request."""
    logits = torch.nn.functional.one_hot(torch.tensor([*choices, 0, 0, 0, 0][:5]), 10).float()
    return verify_greedy(TREE, logits.expand(3, -1, -1))


def test_ragged_tokens_are_appended_behind_each_text() -> None:
    round_ = accepted(5, 9, 6, 8)
    assert round_.tokens.tolist() == [[5, 6, 8, -1], [5, -1, -1, -1], [5, -1, -1, -1]]
    assert round_.path.tolist() == [[2, 3, -1], [-1, -1, -1], [-1, -1, -1]]
    text, lengths = append(torch.tensor([[1, 2, 7, 7], [1, 2, 3, 4], [1, -1, -1, -1]]), LENGTHS, round_)
    assert lengths.tolist() == [4, 4, 1]
    assert text.tolist() == [[1, 2, 5, 6, 8], [1, 2, 3, 4, 5], [1, 5, -1, -1, -1]]


def test_a_large_token_cache_keeps_its_width_and_does_not_change_its_argument() -> None:
    before = torch.full((3, 12), 8)
    text, _ = append(before, LENGTHS, accepted(4, 9))
    assert text.shape == (3, 12)
    assert (before == 8).all()
    assert text[1].tolist() == [8, 8, 8, 8, 4, 9, -1, -1, -1, -1, -1, -1]


def test_a_cut_keeps_tokens_and_path_in_step() -> None:
    whole = accepted(5, 9, 6, 7, 8)
    cut = whole.cut(torch.tensor([2, 5, 0]))
    assert whole.tokens[0].tolist() == [5, 6, 7, 8]
    assert cut.tokens.tolist() == [[5, 6, -1, -1], [5, -1, -1, -1], [-1, -1, -1, -1]]
    assert cut.path.tolist() == [[2, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert cut.counts.tolist() == [2, 1, 0]
    before = torch.tensor([[1, 2], [1, 2], [1, -1]])
    text, lengths = append(before, torch.tensor([1, 1, 0]), cut)
    assert lengths.tolist() == [3, 2, 0]
    assert text.tolist() == [[1, 2, 5, 6], [1, 2, 5, -1], [1, -1, -1, -1]]


@pytest.mark.parametrize("choices", [(5, 9, 6, 7, 8), (5, 9, 6, 1), (4, 2), (1,)])
def test_accepted_rows_move_next_to_the_text_and_nothing_before_them_changes(choices: tuple[int, ...]) -> None:
    round_ = accepted(*choices)
    cache = torch.arange(3 * 2 * 9 * 4).view(3, 2, 9, 4).double()
    before = cache.clone()
    assert gather_kv_(cache, LENGTHS, round_) is cache
    for b, length in enumerate(LENGTHS.tolist()):
        rows = [0, *(row for row in round_.path[b].tolist() if row >= 0)]
        assert cache[b, :, : length + 1].equal(before[b, :, : length + 1])
        assert cache[b, :, length : length + len(rows)].equal(before[b, :, [length + row for row in rows]])


@pytest.mark.parametrize(
    "call",
    [
        lambda a: append(torch.zeros(3, 4), LENGTHS, a),
        lambda a: append(torch.zeros(2, 4, dtype=torch.int64), LENGTHS, a),
        lambda a: append(torch.zeros(3, 4, dtype=torch.int64), LENGTHS.float(), a),
        lambda a: gather_kv_(torch.zeros(3, 4, 5), LENGTHS, a),
        lambda a: gather_kv_(torch.zeros(3, 1, 8, 5), LENGTHS[:2], a),
        lambda a: a.cut(torch.tensor(3)),
    ],
)
def test_wrong_shapes_are_refused(call: Any) -> None:
    with pytest.raises(InvalidOption):
        call(accepted(1))
