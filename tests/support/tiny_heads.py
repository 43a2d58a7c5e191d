"""Learned drafters with a few thousand weights for a tiny target: random heads, and Medusa heads fitted to texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoints.head_check import shapes_of
from paceline.models.config import LayerConfig, ModelConfig, NormConfig
from paceline.models.heads import BlockConfig, EagleConfig, MedusaConfig
from paceline.protocols import Target
from paceline.testing import TINY, random_tensors
from paceline.types import Want
from paceline.verify.tree import pack_prefix


def eagle_config(target: ModelConfig = TINY, **changes: object) -> EagleConfig:
    """Return the config of an EAGLE-3 head for this target, with a draft vocabulary of 23 tokens.

    `changes` replaces fields. With `version=1`, it is an EAGLE-1 head with the target's vocabulary.
    """
    layer = replace(target, layers=1, context_length=16)
    first = changes.get("version") == 1
    config = EagleConfig(
        layer=layer,
        taps=("final",) if first else (0, target.layers - 1, "final"),
        target_hidden=target.hidden,
        draft_vocab=target.vocab_size if first else 23,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def eagle_tensors(config: EagleConfig, seed: int = 0, scale: float = 0.4) -> dict[str, Tensor]:
    """Return random weights for an EAGLE head, float32, under the names of `models/heads.py`; norms are not 1."""
    if config.version == 1:
        scale *= 0.4  # such a head does not normalise its output, which would grow with every step
    generator = torch.Generator().manual_seed(seed)
    c, attn = config.layer, "layers.0.self_attn."
    drawn = random_tensors(replace(c, tied=True), seed, scale)
    tensors = {name.removeprefix("model."): x for name, x in drawn.items()}
    if c.hidden == config.target_hidden:
        del tensors["embed_tokens.weight"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (c.hidden, c.hidden + config.target_hidden)}
    norms: dict[str, int] = {}
    if config.version == 1:
        del tensors["norm.weight"], tensors["layers.0.input_layernorm.weight"]
        shapes |= {"fc.bias": (c.hidden,)}
    else:
        wide, kv = len(config.taps) * config.target_hidden, c.kv_heads * c.head_dim
        shapes |= {"fc.weight": (c.hidden, wide), "lm_head.weight": (config.draft_vocab, c.hidden)}
        shapes |= {attn + "q_proj.weight": (c.heads * c.head_dim, 2 * c.hidden)}
        shapes |= {attn + f"{x}_proj.weight": (kv, 2 * c.hidden) for x in "kv"}
        norms |= {"layers.0.hidden_norm": c.hidden}
        norms |= {f"fc_norm.{i}": config.target_hidden for i in range(len(config.taps) * config.fc_norm)}
        norms |= {"input_norm": wide} if config.norm_before_fc else {}
        tensors |= _map(config, generator)
    tensors |= {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
    tensors |= {name + ".weight": torch.ones(size) for name, size in norms.items()}
    shaken = {
        name: 1 + 0.3 * torch.randn(x.shape, generator=generator) for name, x in tensors.items() if "norm" in name
    }
    return tensors | shaken


def _map(config: EagleConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the vocabulary maps of a head, or {} if it has the target's vocabulary."""
    vocab, count = config.layer.vocab_size, config.draft_vocab
    if count == vocab:
        return {}
    ids = torch.randperm(vocab, generator=generator)[:count].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(count), "t2d": known}


def mtp_head(target: ModelConfig, seed: int = 0) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return a random multi-token-prediction layer for a target with gated attention.

    The result is its config and float32 weights by the names of `models/heads.py`.
    """
    layer = replace(target, layers=1, special=(LayerConfig(target.rope),))
    config = EagleConfig(
        layer, ("final",), target.hidden, target.vocab_size, version=1, norm_output=True, built_in=True
    )
    draw, attn, wide = torch.Generator().manual_seed(seed), "layers.0.self_attn.", 2 * target.heads * target.head_dim
    tensors = {name.removeprefix("model."): x for name, x in random_tensors(replace(layer, tied=True), seed).items()}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (target.hidden, 2 * target.hidden)}
    shapes |= {attn + "q_proj.weight": (wide, target.hidden)}
    shapes |= {f"{attn}{x}_norm.weight": (target.head_dim,) for x in "qk"}
    shapes |= {f"pre_fc_norm_{part}.weight": (target.hidden,) for part in ("embedding", "hidden")}
    tensors |= {name: torch.randn(shape, generator=draw) * 0.4 for name, shape in shapes.items()}
    return config, {name: x for name, x in tensors.items() if name != "embed_tokens.weight"}


TINY_BLOCK = BlockConfig(replace(TINY, norms=NormConfig(heads="shared")), taps=(0, 1), size=5, mask_token=36)
"""A block drafter's config that fits `TINY`."""


def block_tensors(config: BlockConfig = TINY_BLOCK, seed: int = 0) -> dict[str, Tensor]:
    """Return normally distributed weights for `config`, float32, under the names of `models/heads.py`; norms are near
    1."""
    c, draw = config.layer, torch.Generator().manual_seed(seed)
    names = [f"layers.{i}.{norm}_layernorm" for i in range(c.layers) for norm in ("input", "post_attention")]
    shapes = dict.fromkeys([*names, "hidden_norm", "norm"], c.hidden)
    if c.norms.heads:
        shapes |= {f"layers.{i}.self_attn.{x}_norm": c.head_dim for i in range(c.layers) for x in "qk"}
    layers = {
        name.removeprefix("model."): tensor
        for name, tensor in random_tensors(c, seed).items()
        if name.startswith("model.layers.")
    }
    fc = torch.randn(c.hidden, len(config.taps) * c.hidden, generator=draw) * 0.3
    if config.markov:
        parts = {
            "markov_head.markov_w1": (c.vocab_size, config.markov),
            "markov_head.markov_w2": (c.vocab_size, config.markov),
        }
        parts |= {"confidence_head.proj": (1, config.confidence)} if config.confidence else {}
        layers |= {name + ".weight": torch.randn(shape, generator=draw) for name, shape in parts.items()}
    norms = {name + ".weight": 1 + 0.2 * torch.randn(size, generator=draw) for name, size in shapes.items()}
    own = {name: shape for name, shape in shapes_of(config)[0].items() if "_conv." in name or "selector" in name}
    layers |= {name: torch.randn(shape, generator=draw) * 0.4 for name, shape in own.items()}
    return layers | norms | {"fc.weight": fc}


TINY_MEDUSA = MedusaConfig(hidden=TINY.hidden, vocab_size=TINY.vocab_size, heads=3, layers=1)
"""A Medusa config that fits `TINY`, with its own output heads."""


def medusa_tensors(config: MedusaConfig = TINY_MEDUSA, seed: int = 0, scale: float = 0.4) -> dict[str, Tensor]:
    """Return normally distributed weights for `config`, float32, under the names of `models/heads.py`."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.heads):
        for layer in range(config.layers):
            block = f"blocks.{head}.layers.{layer}."
            shapes |= {block + "weight": (config.hidden, config.hidden), block + "bias": (config.hidden,)}
        if not config.shared:
            shapes |= {f"lm_heads.{head}.weight": (config.vocab_size, config.hidden)}
    return {name: torch.randn(shape, generator=draw) * scale for name, shape in shapes.items()}


def fitted_medusa(
    target: Target, texts: Sequence[Sequence[int]], config: MedusaConfig = TINY_MEDUSA
) -> dict[str, Tensor]:
    """Return heads that predict the texts exactly, if these have fewer tokens in total than the target's hidden size.

    The residual blocks change nothing, and the output heads are the least-squares solution.
    """
    tensors = {name: torch.zeros_like(x) for name, x in medusa_tensors(config).items()}
    states = [_states(target, text) for text in texts]
    for head in range(config.heads):
        ahead = head + 2
        seen = torch.cat([x[: max(0, len(text) - ahead)] for x, text in zip(states, texts, strict=True)])
        next_ = torch.tensor([token for text in texts for token in text[ahead:]])
        wanted = 50 * torch.nn.functional.one_hot(next_, config.vocab_size).to(seen)
        tensors[f"lm_heads.{head}.weight"] = torch.linalg.lstsq(seen, wanted).solution.T
    return tensors


def _states(target: Target, text: Sequence[int]) -> Tensor:
    """Return the "final" state of every token, [len(text), H]."""
    cache = target.new_cache()
    rows = pack_prefix(text, cache.acquire(), 0, target.device)
    return target.forward(rows, cache, Want("none", taps=("final",))).taps["final"][0, : len(text)]
