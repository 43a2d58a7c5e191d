"""Every drafter, with and without probabilities, for small random models of several kinds with a vocabulary of six."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from paceline.checkpoints.loader import Loaded
from paceline.drafters.assistant import Assistant
from paceline.drafters.base import Drafter
from paceline.drafters.block import Block
from paceline.drafters.cross import SharedTokenDrafter, TextDrafter
from paceline.drafters.eagle import Eagle
from paceline.drafters.early_exit import EarlyExit
from paceline.drafters.medusa import Medusa
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.parallel import ParallelEagle
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.drafters.vocab_map import VocabMap
from paceline.models.config import AttentionConfig, LatentConfig, LayerConfig, ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.heads import AssistantConfig, ExitConfig
from paceline.testing import TINY, random_tensors
from tests.support.hybrids import HYBRID, MAMBA_HYBRID, hybrid_tensors, mamba_tensors
from tests.support.latents import latent_tensors
from tests.support.tiny_heads import (
    TINY_BLOCK,
    TINY_MEDUSA,
    block_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    mtp_head,
)
from tests.support.toys import toy_tokenizer

VOCAB = 6
_LETTERS = "abcde"
_CPU = torch.device("cpu")


def small(config: ModelConfig, tensors: dict[str, torch.Tensor], **changes: object) -> Decoder:
    """Return a model with this config and these tensors, with a vocabulary of six, in float64."""
    embeddings = {name: x[:VOCAB] for name, x in tensors.items() if "embed_tokens" in name}
    own = replace(config, vocab_size=VOCAB, **changes)  # type: ignore[arg-type]
    return Decoder(own, tensors | embeddings, torch.float64, _CPU)


_LATENT = LatentConfig(rank=12, query_rank=0, plain=4, rotary=4, value=6)


def _latent(seed: int) -> Decoder:
    config = replace(TINY, kv_heads=1, head_dim=16, attention=AttentionConfig(latent=_LATENT))
    return small(config, latent_tensors(config, seed, scale=0.4))


KINDS: dict[str, Callable[[int], Decoder]] = {
    "attention": lambda seed: small(TINY, random_tensors(TINY, seed)),
    "window": lambda seed: small(
        TINY, random_tensors(TINY, seed), special=(LayerConfig(TINY.rope, window=4), LayerConfig(TINY.rope))
    ),
    "gated deltanet": lambda seed: small(HYBRID, hybrid_tensors(seed)),
    "mamba-2": lambda seed: small(MAMBA_HYBRID, mamba_tensors(seed)),
    "latent attention": _latent,
}
"""Kind of model -> function from a seed to a random model."""


def loaded(model: Decoder, letters: str = _LETTERS) -> Loaded:
    """Return the model with a tokenizer of one letter per token."""
    return Loaded(model, toy_tokenizer(letters), (VOCAB - 1,), {}, Path("small"))


def _eagle(target: Decoder, **changes: object) -> Drafter:
    config = eagle_config(target.config, **{"layer": _layer(target), "draft_vocab": 4, **changes})
    return Eagle(config, eagle_tensors(config), target)


def _parallel(target: Decoder) -> Drafter:
    config = eagle_config(target.config, layer=_layer(target), draft_vocab=4, mask_token=VOCAB - 1)
    wide = len(config.taps) * config.target_hidden
    mask = torch.randn(1, 1, wide, generator=torch.Generator().manual_seed(4))
    return ParallelEagle(config, eagle_tensors(config) | {"mask_hidden": mask}, target)


def _block(target: Decoder, **changes: object) -> Drafter:
    layer = replace(TINY_BLOCK.layer, vocab_size=VOCAB)
    config = replace(TINY_BLOCK, layer=layer, mask_token=VOCAB - 1, **changes)  # type: ignore[arg-type]
    return Block(config, block_tensors(config), target)


def _medusa(target: Decoder) -> Drafter:
    config = replace(TINY_MEDUSA, vocab_size=VOCAB)
    return Medusa(config, medusa_tensors(config), target)


def _mtp(target: Decoder) -> Drafter:
    config, tensors = mtp_head(replace(HYBRID, vocab_size=VOCAB))
    return Eagle(config, tensors, target)


def _assistant(target: Decoder) -> Drafter:
    (own,) = {(one.head_dim, one.kv_heads) for one in [target.config.of(target.config.plan[-1])]}
    layer = replace(
        TINY, layers=1, vocab_size=VOCAB, head_dim=own[0], kv_heads=own[1], attention=AttentionConfig(scale=1.0)
    )
    wide, draw = target.config.hidden, torch.Generator().manual_seed(3)
    shapes = {"pre_projection.weight": (layer.hidden, 2 * wide), "post_projection.weight": (wide, layer.hidden)}
    drawn = random_tensors(layer, 3) | {name: torch.randn(s, generator=draw) * 0.2 for name, s in shapes.items()}
    tensors = {name: x for name, x in drawn.items() if ".k_proj" not in name and ".v_proj" not in name}
    return Assistant(AssistantConfig(layer, wide), tensors, target)


def _layer(target: Decoder) -> ModelConfig:
    """Return the layer of a head. It has plain attention, whatever the target has."""
    return replace(TINY, layers=1, vocab_size=VOCAB, context_length=16)


def _foreign(target: Decoder) -> VocabMap:
    return VocabMap(loaded(target), loaded(KINDS["attention"](9), _LETTERS[::-1]))


EVERY: dict[str, Callable[[Decoder], Drafter]] = {
    "ngram": lambda target: NGram(),
    "suffix": lambda target: Suffix(remember=True, floor=0.0),
    "another model": lambda target: DraftModel(KINDS["attention"](9), VOCAB),
    "the model itself": lambda target: DraftModel(target, VOCAB),
    "a model with a trimmed vocabulary": lambda target: DraftModel(_trimmed(), VOCAB, torch.tensor([0, 1, 3, 5])),
    "shared tokens": lambda target: SharedTokenDrafter(_foreign(target)),
    "text": lambda target: TextDrafter(_foreign(target)),
    "eagle-3": _eagle,
    "eagle-1": lambda target: _eagle(target, version=1, taps=("final",), draft_vocab=VOCAB),
    "mtp": _mtp,
    "p-eagle": _parallel,
    "block": _block,
    "block with a markov head": lambda target: _block(target, markov=6),
    "block with a selector": lambda target: _block(target, conv=2, conv_group=8, selector=6, candidates=5),
    "medusa": _medusa,
    "assistant": _assistant,
    "early exit": lambda target: EarlyExit(ExitConfig(target.config.hidden, 1), {}, target, threshold=0.0),
    "stack": lambda target: DrafterStack([NGram(), DraftModel(KINDS["attention"](9), VOCAB)]),
}
"""Name of a drafter -> function from a target to the drafter."""

HEADS = {
    "eagle": "eagle-1",
    "eagle3": "eagle-3",
    "mtp": "mtp",
    "peagle": "p-eagle",
    "medusa": "medusa",
    "block": "block",
    "exit": "early exit",
    "assistant": "assistant",
}
"""Kind of head (`heads.kind_of`) -> name of its drafter in `EVERY`."""

PAIRS = [(kind, drafter) for kind in KINDS for drafter in EVERY if (kind, drafter) != ("latent attention", "assistant")]
"""All kinds of models with all drafters. An assistant reads keys and values, which latent attention does not store."""


def _trimmed() -> Decoder:
    config = replace(TINY, vocab_size=VOCAB)
    kept = torch.tensor([0, 1, 3, 5])
    return Decoder(config, random_tensors(config, 9), torch.float64, _CPU, head_tokens=kept)
