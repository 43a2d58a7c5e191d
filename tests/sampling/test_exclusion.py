"""XTC and top-n-sigma compared with their formulas, and XTC's random choice."""

from __future__ import annotations

import math
import random

import pytest
import torch

from paceline.sampling.noise import Noise
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Prefix, Sampler


def survivors(logits: list[float], threshold: float) -> list[int]:
    """Apply XTC by definition: keep only the least likely of the tokens that reach the threshold."""
    total = sum(map(math.exp, logits))
    chances = [math.exp(logit) / total for logit in logits]
    likely = [chance for chance in chances if chance >= threshold]
    return [i for i, chance in enumerate(chances) if len(likely) < 2 or chance <= min(likely)]


def support(logits: list[float], **how: float) -> list[int]:
    row = torch.tensor(logits, dtype=torch.float64)
    return Sampler(1.0, **how).distribution(Prefix(), row).nonzero()[:, 0].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_xtc_drops_all_likely_tokens_but_the_least_likely_of_them(seed: int) -> None:
    draw = random.Random(seed)
    logits = [draw.gauss(0, 2) for _ in range(draw.choice([1, 2, 6, 300]))]
    for threshold in (0.0, 0.02, 0.1, 0.3, 0.5):
        assert support(logits, xtc_probability=1.0, xtc_threshold=threshold) == survivors(logits, threshold)
    assert support(logits, xtc_probability=1.0, xtc_threshold=0.51) == [*range(len(logits))]
    assert support(logits, xtc_probability=0.0) == [*range(len(logits))]


def test_xtc_looks_at_what_the_other_cuts_leave() -> None:
    logits = [math.log(p) for p in (0.08, 0.5, 0.09, 0.3, 0.03)]
    assert support(logits, xtc_probability=1.0) == [0, 2, 3, 4]
    assert support(logits, xtc_probability=1.0, top_k=4) == [0, 2, 3]
    assert support(logits, xtc_probability=1.0, top_k=4, xtc_threshold=0.09) == [0, 2]
    assert support(logits, xtc_probability=1.0, min_p=0.5) == [3]


def test_xtc_decides_by_seed_and_position_with_its_probability() -> None:
    row = torch.tensor([2.0, 1.5, 1.0])

    def decided(noise: Noise) -> list[bool]:
        sampler = Sampler(1.0, xtc_probability=0.3, noise=noise)
        return [bool(sampler.distribution(Prefix(range(at)), row)[0] == 0) for at in range(2000)]

    first = decided(Noise(5))
    assert decided(Noise(5)) == first
    assert decided(Noise(5, 1)) != first != decided(Noise(6))
    assert abs(sum(first) / 2000 - 0.3) < 0.035, "three and a half standard deviations"


def test_xtc_is_independent_of_the_tokens_noise() -> None:
    """If XTC does not change a row, its token is drawn as without XTC, and otherwise from the remaining tokens."""
    row, counts = torch.tensor([1.0, 0.5, 0.0]), torch.zeros(2, 3)
    sampler = Sampler(1.0, xtc_probability=0.5, noise=Noise(8))
    for at in range(800):
        prefix = Prefix(range(at))
        excluded = bool(sampler.distribution(prefix, row)[0] == 0)
        counts[int(excluded), sampler.choose(prefix, row)] += 1
    plain, cut = row.softmax(-1), torch.tensor([0.0, 0.0, 1.0])
    assert (counts[0] / counts[0].sum() - plain).abs().max() < 0.06
    torch.testing.assert_close(counts[1] / counts[1].sum(), cut)


@pytest.mark.parametrize("seed", range(20))
def test_top_n_sigma_keeps_logits_near_the_highest_at_any_temperature(seed: int) -> None:
    draw = random.Random(seed)
    logits = [draw.gauss(0, 3) for _ in range(draw.choice([1, 2, 40, 900]))]
    mean = sum(logits) / len(logits)
    sigma = math.sqrt(sum((logit - mean) ** 2 for logit in logits) / len(logits))
    row = torch.tensor(logits, dtype=torch.float64)
    for n in (0.5, 1.0, 2.5):
        kept = [i for i, logit in enumerate(logits) if logit >= max(logits) - n * sigma]
        for temperature in (0.3, 1.0, 4.0):
            sampler = Sampler(temperature, top_n_sigma=n)
            assert sampler.distribution(Prefix(), row).nonzero()[:, 0].tolist() == kept
    assert support(logits, top_n_sigma=0.0) == [*range(len(logits))]


def test_top_n_sigma_does_not_count_banned_tokens() -> None:
    logits = [0.0, 1.0, 2.0, 3.0] + [-math.inf] * 3
    assert support(logits, top_n_sigma=1.0) == [2, 3]
    banned = Sampling(temperature=1.0, top_n_sigma=1.0, logit_bias=dict.fromkeys(range(4, 300), -math.inf)).sampler()
    row = torch.tensor([0.0, 1.0, 2.0, 3.0] + [9.0] * 296)
    assert banned.distribution(Prefix(), row).nonzero()[:, 0].tolist() == [2, 3]


def test_xtc_never_leaves_only_banned_tokens() -> None:
    how = Sampling(temperature=1.0, seed=1, xtc_probability=1.0, xtc_threshold=0.0, logit_bias={0: -math.inf})
    assert how.sampler().choose(Prefix(), torch.tensor([9.0, 2.0, 1.0, 3.0])) == 2


def test_greedy_text_ignores_them() -> None:
    row = torch.tensor([2.0, 3.0, 2.9])
    assert Sampler(0.0, xtc_probability=1.0, xtc_threshold=0.1, top_n_sigma=0.1).choose(Prefix(), row) == 1
