"""Prompts for tiny models with experts or latent attention, and their replies without a drafter."""

from __future__ import annotations

from paceline.models.decoder import Decoder
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget
from tests.support.logits import text
from tests.support.plain import plain_text

CHAIN, TREE = DraftBudget.chain(4), DraftBudget(8, 4, 3)
SAMPLINGS = [Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=0.9, seed=3)]
PROMPTS = [text(40), text(70)[31:]]


def plain(target: Decoder) -> list[list[int]]:
    return [plain_text(target, prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
