from __future__ import annotations

import math

import pytest
import torch

from paceline.sampling.noise import Noise

TOKENS = torch.arange(50_000)
KNOWN = [0.25487, -0.23867, -1.00885, -1.22382]
KNOWN_UNIFORM = [0.57804506, 0.59745463, 0.071524]


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


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    values = torch.tensor([Noise(1).uniform(p) for p in range(20_000)], dtype=torch.float64).sort().values
    expected = (torch.arange(len(values)) + 0.5) / len(values)
    assert (values - expected).abs().max() < 1.63 / math.sqrt(len(values)), "Kolmogorov-Smirnov at 1 %"
    assert values[0] >= 0
    assert values[-1] < 1


def test_streams_know_nothing_of_each_other_nor_of_the_noise_they_come_from() -> None:
    noise = Noise(7)
    keys = [(0, 5), (1, 5), (0, 6), (0, 5, 0), (0, 5, 1), (0, 5, 1, 0), (0, 5, 0, 1), (0, 0, 5), (5,), ()]
    rows = [noise.gumbel(0, TOKENS), noise.gumbel(5, TOKENS), *[noise.stream(*key).gumbel(0, TOKENS) for key in keys]]
    correlation = torch.corrcoef(torch.stack(rows).double()) - torch.eye(len(rows))
    assert correlation.abs().max() < 0.025
    uniforms = torch.tensor([[noise.stream(*key).uniform(n) for n in range(2000)] for key in keys])
    assert (torch.corrcoef(uniforms) - torch.eye(len(keys))).abs().max() < 0.1
    assert noise.stream(0, 5) == noise.stream(0, 5) != Noise(7, 1).stream(0, 5)


def test_known_values_of_streams_never_change() -> None:
    stream = Noise(42, 1).stream(1, 20)
    assert [round(stream.uniform(n), 8) for n in range(3)] == KNOWN_UNIFORM
