"""The kinds of drafters that can be trained, and how each begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.errors import InvalidOption, UnsupportedModel
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, MedusaConfig
from paceline.train.block import BlockRecipe
from paceline.train.block import default_taps as spread_taps
from paceline.train.eagle3 import Eagle3, default_taps
from paceline.train.early_exit import EarlyExitRecipe
from paceline.train.medusa import MedusaRecipe
from paceline.train.recipe import Recipe
from paceline.types import Tap


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user may say about the drafter; None leaves it to the kind.

    `vocabulary` [K]: the tokens it is to know, ascending. `steps`: of the drafts that it is trained for. `taps`,
    `ffn`: of EAGLE's layer. `layers`: of the target before an early exit, of a block drafter, or of each of Medusa's
    heads; `rank`: of the adapter at the exit.
    """

    vocabulary: Tensor
    steps: int
    taps: tuple[Tap, ...] | None = None
    ffn: int | None = None
    layers: int | None = None
    rank: int = 256


def eagle3(llm: LLM, wish: Wish) -> Recipe:
    target = native(llm)
    c = target.config
    layer = one_layer(c, wish.ffn or c.ffn)
    taps = wish.taps or default_taps(c.layers)
    config = EagleConfig(layer, taps, c.hidden, len(wish.vocabulary), fc_norm=True)
    return Eagle3(config, target, wish.vocabulary, wish.steps)


def medusa(llm: LLM, wish: Wish) -> Recipe:
    target = native(llm)
    c = target.config
    config = MedusaConfig(c.hidden, c.vocab_size, wish.steps, wish.layers or 1, shared=True)
    return MedusaRecipe(config, target, wish.vocabulary)


def early_exit(llm: LLM, wish: Wish) -> Recipe:
    target = native(llm)
    c = target.config
    layers = wish.layers or max(1, c.layers // 4)
    if not 0 < layers < c.layers:
        raise InvalidOption(f"an exit after {layers} of {c.layers} layers is not possible", f"Give 1 to {c.layers - 1}")
    config = ExitConfig(c.hidden, layers, min(wish.rank, c.hidden))
    return EarlyExitRecipe(config, target, wish.vocabulary, wish.steps, c.norm_eps)


def block(llm: LLM, wish: Wish) -> Recipe:
    target = native(llm)
    c = target.config
    layer = replace(one_layer(c, wish.ffn or c.ffn, wish.layers or 2), family="qwen3", qk_norm=True)
    taps = wish.taps or spread_taps(c.layers)
    # Any token that the target never writes will do for a mask; the end of a sequence never stands inside a block.
    config = BlockConfig(layer, taps, wish.steps + 1, mask_token=llm.model.eos[0])
    return BlockRecipe(config, target, wish.vocabulary)


def check_taps(taps: Sequence[Tap], layers: int) -> None:
    """Raises `InvalidOption` for a layer that the target has not."""
    for tap in taps:
        if tap == "final" or not 0 <= tap < layers:  # no layout has a number for the final state
            raise InvalidOption(f"this target has no layer {tap} to listen to", f"Give 0 to {layers - 1}")


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


KINDS: dict[str, Callable[[LLM, Wish], Recipe]] = {
    "eagle3": eagle3,
    "medusa": medusa,
    "early-exit": early_exit,
    "block": block,
}
