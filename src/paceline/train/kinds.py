"""Kinds of drafters that can be trained, and their recipes for a target."""

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
class DrafterOptions:
    """Choices about a drafter's size; None means the kind's default.

    `vocabulary` [K]: token ids that it knows, ascending. `steps`: length of the drafts that it is trained for. `taps`:
    layers that it reads, and `ffn`: width of its feed-forward part (EAGLE-3, block). `layers`: of the target before an
    early exit, of a block drafter, or of each Medusa head. `rank`: of the adapter at an early exit.
    """

    vocabulary: Tensor
    steps: int
    taps: tuple[Tap, ...] | None = None
    ffn: int | None = None
    layers: int | None = None
    rank: int = 256


def _eagle3(llm: LLM, options: DrafterOptions) -> Recipe:
    target = native(llm)
    c = target.config
    layer = one_layer(c, options.ffn or c.ffn)
    taps = options.taps or default_taps(c.layers)
    config = EagleConfig(layer, taps, c.hidden, len(options.vocabulary), fc_norm=True)
    return Eagle3(config, target, options.vocabulary, options.steps)


def _medusa(llm: LLM, options: DrafterOptions) -> Recipe:
    target = native(llm)
    c = target.config
    config = MedusaConfig(c.hidden, c.vocab_size, options.steps, options.layers or 1, shared=True)
    return MedusaRecipe(config, target, options.vocabulary)


def _early_exit(llm: LLM, options: DrafterOptions) -> Recipe:
    target = native(llm)
    c = target.config
    layers = options.layers or max(1, c.layers // 4)
    if not 0 < layers < c.layers:
        raise InvalidOption(f"an early exit must be after 1 to {c.layers - 1} layers, got {layers}", "Correct --layers")
    config = ExitConfig(c.hidden, layers, min(options.rank, c.hidden))
    return EarlyExitRecipe(config, target, options.vocabulary, options.steps, c.norm_eps)


def _block(llm: LLM, options: DrafterOptions) -> Recipe:
    target = native(llm)
    c = target.config
    layer = replace(one_layer(c, options.ffn or c.ffn, options.layers or 2), family="qwen3", qk_norm=True)
    taps = options.taps or spread_taps(c.layers)
    # The mask may be any token that never stands inside a block, such as the end of a sequence.
    config = BlockConfig(layer, taps, options.steps + 1, mask_token=llm.model.eos[0])
    return BlockRecipe(config, target, options.vocabulary)


def check_taps(taps: Sequence[Tap], layers: int) -> None:
    """Raise `InvalidOption` for a layer that the target does not have."""
    for tap in taps:
        if tap == "final" or not 0 <= tap < layers:  # layouts have no number for the final state
            raise InvalidOption(
                f"taps must be layers from 0 to {layers - 1} of this target, got {tap}", "Correct --taps"
            )


def one_layer(c: ModelConfig, ffn: int, layers: int = 1) -> ModelConfig:
    """Return the config of plain Llama layers with a target's own sizes."""
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
    """Return the target. Raises `UnsupportedModel` for one that does not run natively."""
    if not isinstance(llm.model.target, Decoder):
        raise UnsupportedModel(
            f"{llm.model.path} runs through transformers, and drafters can be trained for native models only",
            "Choose a model of a native family (see paceline info MODEL)",
        )
    return llm.model.target


KINDS: dict[str, Callable[[LLM, DrafterOptions], Recipe]] = {
    "eagle3": _eagle3,
    "medusa": _medusa,
    "early-exit": _early_exit,
    "block": _block,
}
"""Name as in --kind -> the recipe for a target."""
