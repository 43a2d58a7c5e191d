"""Random EAGLE heads for a toy target, for tests of learned drafters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.config import ModelConfig
from paceline.models.heads import EagleConfig
from paceline.testing.tiny import TINY, random_tensors


def eagle_config(target: ModelConfig = TINY, **changes: object) -> EagleConfig:
    """Return the config of an EAGLE-3 head for this target, with a draft vocabulary of 23 tokens. `changes`: its
    fields.

    With `version=1` it is an EAGLE-1 head, whose draft vocabulary is the target's.
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
        scale *= 0.4  # nothing norms what such a head hands on, and it would grow with every step
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
    """Return the maps of a head with a reduced draft vocabulary; empty if it has the target's."""
    vocab, count = config.layer.vocab_size, config.draft_vocab
    if count == vocab:
        return {}
    ids = torch.randperm(vocab, generator=generator)[:count].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(count), "t2d": known}
