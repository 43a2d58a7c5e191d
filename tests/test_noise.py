from __future__ import annotations

import math

import pytest
import torch

from paceline.noise import Noise

TOKENS = torch.arange(50_000)
KNOWN = [0.25487, -0.23867, -1.00885, -1.22382]


def test_same_place_same_number_whatever_travels_with_it() -> None:
    row = Noise(7).gumbel(100, TOKENS)
    some = torch.tensor([49_999, 3, 3, 17])
    assert torch.equal(Noise(7).gumbel(100, some), row[some])
    assert torch.equal(Noise(7).gumbel(100, some.view(2, 2)), row[some].view(2, 2))


@pytest.mark.parametrize(
    "other", [Noise(8).gumbel(100, TOKENS), Noise(7, 1).gumbel(100, TOKENS), Noise(7).gumbel(101, TOKENS)]
)
def test_seed_sample_and_position_each_change_everything(other: torch.Tensor) -> None:
    row = Noise(7).gumbel(100, TOKENS)
    assert (row == other).float().mean() < 1e-3
    correlation = torch.corrcoef(torch.stack([row, other]))[0, 1]
    assert abs(correlation) < 0.02


def test_it_is_standard_gumbel() -> None:
    values = torch.cat([Noise(1).gumbel(p, TOKENS) for p in range(20)]).double().sort().values
    expected = (torch.arange(len(values)) + 0.5) / len(values)
    distance = (torch.exp(-torch.exp(-values)) - expected).abs().max()
    assert distance < 1.63 / math.sqrt(len(values)), "Kolmogorov-Smirnov at 1 %"
    assert torch.isfinite(values).all()


def test_neighbouring_tokens_and_positions_are_independent() -> None:
    grid = torch.stack([Noise(3).gumbel(p, TOKENS[:2000]) for p in range(200)]).double()
    along = torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1]
    down = torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1]
    assert abs(along) < 0.008
    assert abs(down) < 0.008


def test_known_values_never_change() -> None:
    """Seeds must mean the same text in every release: these numbers are part of the contract."""
    row = Noise(42, 1).gumbel(5, torch.tensor([0, 1, 49_151, 262_143]))
    assert [round(x, 5) for x in row.tolist()] == KNOWN
