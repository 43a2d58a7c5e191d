"""Documents and recipes small enough to train in a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Subset

from paceline.models.heads import EagleConfig
from paceline.sampling.parameters import Sampling
from paceline.testing import run, tiny_target
from paceline.train.documents import Document
from paceline.train.eagle3 import Eagle3Recipe
from paceline.train.kinds import one_layer
from paceline.train.loop import Trainer, TrainPlan
from paceline.train.states import States

TARGET = tiny_target(layers=4)
TAPS = (0, 2, 3)


def selection(documents: Sequence[Document]) -> Subset[Document]:
    return Subset(documents, range(len(documents)))  # type: ignore[arg-type]


def documents(count: int, seed: int = 0, length: int = 24) -> list[Document]:
    """Return documents of two tokens, a and b, and an easily learned answer: it counts from a in steps of b."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        a, b = torch.randint(1, 30, (2,), generator=generator).tolist()
        text = [(a + i * (b % 3)) % 37 for i in range(length + int(torch.randint(0, 6, (1,), generator=generator)))]
        made.append(Document(tuple(text[:5]), tuple(text[5:])))
    return made


def recipe(steps: int = 3, vocabulary: int = 30, seed: int = 0, **flags: bool) -> Eagle3Recipe:
    torch.manual_seed(seed)
    config = EagleConfig(one_layer(TARGET.config, 48), TAPS, TARGET.config.hidden, vocabulary, fc_norm=True, **flags)
    return Eagle3Recipe(config, TARGET, torch.arange(37)[-vocabulary:], steps)


def trainer(
    folder: Path, plan: TrainPlan | None = None, count: int = 96, identity: str = "toy", **more: object
) -> Trainer:
    states = States(TARGET, selection(documents(count)), TAPS)
    held = States(TARGET, selection(documents(16, seed=1)), TAPS)
    plan = plan or TrainPlan(epochs=1, batch=4, rate=5e-3, every=1e9, evaluate=1e9)
    return Trainer(recipe(), states, held, plan, folder, identity, **more)  # type: ignore[arg-type]


def written(count: int, seed: int) -> list[Document]:
    """Return greedy texts of the toy target for random prompts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        prompt = torch.randint(0, 37, (4,), generator=generator).tolist()
        answer, _, _ = run(TARGET, prompt, Sampling(max_new_tokens=24))
        made.append(Document(tuple(prompt), tuple(answer)))
    return made
