"""Comparison of texts from many seeds with the target's exact distribution: two bigram models, and a statistic."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from paceline.drafters.base import Drafter
from paceline.drafters.model import DraftModel
from paceline.engine.engine import Engine
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.types import DraftBudget
from tests.support.bigram import Bigram

VOCAB, LENGTH, SEEDS, WARM = 3, 3, 400, 0.8
# The residual distribution has two tokens, one that the drafter prefers and one that it does not. In this case, shared
# noise would be visible.
P = torch.tensor([[0.10, 0.55, 0.35], [0.35, 0.10, 0.55], [0.55, 0.35, 0.10]]).double()
Q = torch.tensor([[0.55, 0.42, 0.03], [0.03, 0.55, 0.42], [0.42, 0.03, 0.55]]).double()
TARGET, OTHER = Bigram(P.log() * WARM), Bigram(Q.log() * WARM)
CHAIN, TREE = DraftBudget.chain(2), DraftBudget(4, 2, 2)


def chi_square(
    rule: str,
    draft: DraftBudget,
    drafter: Callable[[Bigram, int], Drafter] = DraftModel,
    seeds: int = SEEDS,
    length: int = LENGTH,
    prompt: Sequence[int] = (0,),
) -> float:
    """Return the distance of texts from many seeds from the exact distribution, in units of the 0.1 % quantile.

    A distance above 1 is not chance. Texts with fewer than five expected occurrences are counted together.
    """
    engine = Engine(TARGET, drafter(OTHER, VOCAB), draft)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(seeds):
        sampling = Sampling(max_new_tokens=length, temperature=WARM, seed=seed, rule=rule)  # type: ignore[arg-type]
        counts[tuple(run(TARGET, prompt, sampling, engine=engine)[0])] += 1
    cells: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text in itertools.product(range(VOCAB), repeat=length):
        expected = seeds * math.prod(float(P[a, b]) for a, b in itertools.pairwise((prompt[-1], *text)))
        cell = cells[text if expected >= 5 else "rare"]
        cell[0], cell[1] = cell[0] + expected, cell[1] + counts[text]
    total, free = sum((seen - expected) ** 2 / expected for expected, seen in cells.values()), len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile.
    return total / (free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3)
