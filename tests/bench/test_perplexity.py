"""Perplexity of a text, computed by windows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.perplexity import TokenScores, score, windows
from paceline.errors import InvalidOption, InvalidPrompt
from paceline.testing import tiny_target
from paceline.types import Want
from paceline.verify.tree import pack_prefix

TOY = tiny_target()


@given(st.integers(2, 120), st.integers(2, 40), st.data(), st.sampled_from([(), (99,)]))
def test_every_token_is_predicted_once_with_its_context(
    count: int, size: int, data: st.DataObject, front: tuple[int, ...]
) -> None:
    context = data.draw(st.integers(1, size - 1))
    seen: list[int] = []
    for piece in windows(range(count), size, context, front):
        assert list(piece.tokens[: len(front)]) == list(front)
        own = list(piece.tokens[len(front) :])
        assert own == list(range(own[0], own[0] + len(own)))
        assert len(own) <= size
        fresh = list(piece.tokens[piece.first :])
        assert fresh
        assert not seen or fresh[0] - own[0] == context
        seen += fresh
    assert seen == list(range(0 if front else 1, count))


def test_invalid_windows_are_refused() -> None:
    for size, context in ((8, 0), (8, 8), (8, 9)):
        with pytest.raises(InvalidOption):
            windows(range(50), size, context)
    with pytest.raises(InvalidPrompt):
        windows([3], 8, 2)


@pytest.mark.parametrize("front", [(), (5,)])
@pytest.mark.parametrize("rows", [128, 7])
def test_scores_equal_the_scores_of_each_window_fed_at_once(
    monkeypatch: pytest.MonkeyPatch, front: tuple[int, ...], rows: int
) -> None:
    monkeypatch.setattr("paceline.bench.perplexity._ROWS", rows)
    tokens = torch.randint(0, 37, (75,), generator=torch.Generator().manual_seed(0)).tolist()
    scored = score(TOY, windows(tokens, 30, 10, front))
    losses, best = [], []
    for start, first in ((0, 1 - len(front)), (20, 10), (40, 10), (60, 10)):
        text = [*front, *tokens[start : start + 30]]
        cache = TOY.new_cache()
        logits = TOY.forward(pack_prefix(text, cache.acquire(), 0, TOY.device), cache, Want()).logits[0, : len(text)]
        at = range(len(front) + first, len(text))
        losses += [-float(logits[i - 1].log_softmax(-1)[text[i]]) for i in at]
        best += [int(logits[i - 1].argmax()) for i in at]
    assert len(losses) == 75 - (not front)
    assert torch.allclose(scored.losses, torch.tensor(losses, dtype=torch.float64))
    assert scored.best.tolist() == best
    assert math.isclose(scored.perplexity, math.exp(sum(losses) / len(losses)))


def test_agreement_is_a_share() -> None:
    one, other = (TokenScores(torch.zeros(4), torch.tensor(best)) for best in ([1, 2, 3, 4], [1, 2, 0, 4]))
    assert one.agreement(other) == 0.75
