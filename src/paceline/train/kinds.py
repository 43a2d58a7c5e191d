"""The kinds of drafters that can be trained, and how each begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import EagleConfig
from paceline.train.eagle3 import Eagle3, default_taps
from paceline.train.recipe import Recipe
from paceline.types import Tap


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user may say about the drafter; None leaves it to the kind. `vocabulary` [K]: the tokens it is to know,
    ascending. `steps`: of the drafts that it is trained for."""

    vocabulary: Tensor
    steps: int
    taps: tuple[Tap, ...] | None = None
    ffn: int | None = None


def eagle3(llm: LLM, wish: Wish) -> Recipe:
    target = native(llm)
    c = target.config
    layer = one_layer(c, wish.ffn or c.ffn)
    taps = wish.taps or default_taps(c.layers)
    config = EagleConfig(layer, taps, c.hidden, len(wish.vocabulary), fc_norm=True)
    return Eagle3(config, target, wish.vocabulary, wish.steps)


def one_layer(c: ModelConfig, ffn: int, layers: int = 1) -> ModelConfig:
    """Plain Llama layers of a target's own sizes."""
    return ModelConfig(
        family="llama",
        vocab_size=c.vocab_size,
        hidden=c.hidden,
        layers=layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        ffn=ffn,
        context_length=c.context_length,
        norm_eps=c.norm_eps,
        rope=replace(c.plan[-1].rope or c.rope, kind="default", scaling=(), factors=(), long_factors=(), share=1.0),
    )


def native(llm: LLM) -> Decoder:
    """Raises `UnsupportedModel` for a target that does not run natively."""
    if not isinstance(llm.model.target, Decoder):
        raise UnsupportedModel(
            f"{llm.model.path} runs through transformers, where no drafter can be trained",
            "Train for a model of a native family (paceline info MODEL)",
        )
    return llm.model.target


KINDS: dict[str, Callable[[LLM, Wish], Recipe]] = {"eagle3": eagle3}
