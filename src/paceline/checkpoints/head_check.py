"""Checks of a learned drafter's tensors against its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, MedusaConfig, TrainableConfig

Shapes = dict[str, tuple[int, ...]]

_FETCH_AGAIN = "Fetch the head again"
_INTEGERS = (torch.int64, torch.int32, torch.bool, torch.uint8)
MAPS = ("d2t", "t2d", "token_map")
"""Names of tensors that map the rows of a reduced vocabulary to the target's tokens."""


def shapes_of(config: TrainableConfig) -> tuple[Shapes, Shapes]:
    """Return the shapes of the tensors that a head must have, and of the tensors that it may have. `models/heads.py`
    lists the names."""
    if isinstance(config, EagleConfig):
        return _eagle3(config) if config.version == 3 else _eagle(config)
    if isinstance(config, MedusaConfig):
        return _medusa(config)
    return _block(config) if isinstance(config, BlockConfig) else _exit(config)


def _eagle3(c: EagleConfig) -> tuple[Shapes, Shapes]:
    h, wide, vocab = c.layer.hidden, (len(c.taps) or 3) * c.target_hidden, c.layer.vocab_size
    needed, allowed = _layers(c.layer, 2 * h)
    needed |= {"fc.weight": (h, wide), "layers.0.hidden_norm.weight": (h,), "norm.weight": (h,)}
    if c.mask_token is not None:
        needed["mask_hidden"] = (1, 1, wide)
    if c.norm_before_fc:
        needed["input_norm.weight"] = (wide,)
    if c.fc_norm:
        needed |= {f"fc_norm.{i}.weight": (c.target_hidden,) for i in range(wide // c.target_hidden)}
    maps: Shapes = {"d2t": (c.draft_vocab,), "t2d": (vocab,)}
    embedding: Shapes = {"embed_tokens.weight": (vocab, h)}
    head: Shapes = {"lm_head.weight": (c.draft_vocab, h)}
    # If a head's width differs from the target's, the head must store its own embedding and output head.
    for part, must in ((maps, c.draft_vocab != vocab), (embedding | head, h != c.target_hidden)):
        (needed if must else allowed).update(part)
    return needed, allowed


def _eagle(c: EagleConfig) -> tuple[Shapes, Shapes]:
    h = c.layer.hidden
    needed, allowed = _layers(c.layer, h)
    norm = "layers.0.input_layernorm.weight"  # the reference has none, because the target has already normed the input
    allowed |= {norm: needed.pop(norm), "fc.bias": (h,), "embed_tokens.weight": (c.layer.vocab_size, h)}
    return needed | {"fc.weight": (h, 2 * h)}, allowed


def _medusa(c: MedusaConfig) -> tuple[Shapes, Shapes]:
    blocks = [f"blocks.{i}.layers.{j}" for i in range(c.heads) for j in range(c.layers)]
    needed: Shapes = {f"{name}.weight": (c.hidden, c.hidden) for name in blocks}
    if not c.shared:
        needed |= {f"lm_heads.{i}.weight": (c.draft_vocab, c.hidden) for i in range(c.heads)}
    maps: Shapes = {"token_map": (c.draft_vocab,)}
    allowed: Shapes = {f"{name}.bias": (c.hidden,) for name in blocks}
    return (needed | maps, allowed) if c.draft_vocab != c.vocab_size else (needed, allowed | maps)


def _block(c: BlockConfig) -> tuple[Shapes, Shapes]:
    h = c.layer.hidden
    needed: Shapes = {"fc.weight": (h, len(c.taps) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    must, allowed = _layers(c.layer, h)
    needed |= must
    if c.draft_vocab not in (0, c.layer.vocab_size):
        maps: Shapes = {"d2t": (c.draft_vocab,), "t2d": (c.layer.vocab_size,)}
        needed |= maps | {"lm_head.weight": (c.draft_vocab, h)}
    if c.markov:
        needed["markov_head.markov_w1.weight"] = (c.layer.vocab_size, c.markov)
        needed["markov_head.markov_w2.weight"] = (c.draft_vocab or c.layer.vocab_size, c.markov)
    if c.confidence:
        needed["confidence_head.proj.weight"] = (1, c.confidence)
        allowed["confidence_head.proj.bias"] = (1,)
    return needed | _dflash2(c), allowed


def _dflash2(c: BlockConfig) -> Shapes:
    """Return the shapes of the tensors that only DFlash 2 has."""
    h, found = c.layer.hidden, Shapes()
    for i in range(c.layer.layers if c.conv else 0):
        for part in ("attention", "mlp"):
            name = f"layers.{i}.{part}_conv."
            found[name + "base_kernel"] = (2, c.conv, h)
            found[name + "kernel_projection.weight"] = (2 * c.conv * (h // c.conv_group), h)
    if c.selector:
        found |= {
            f"candidate_selector.{x}_codebook": (c.layer.vocab_size, c.selector) for x in ("predecessor", "successor")
        }
        found["candidate_selector.hidden_projection.weight"] = (c.selector, h)
    return found


def _exit(c: ExitConfig) -> tuple[Shapes, Shapes]:
    needed: Shapes = {"norm.weight": (c.hidden,)}
    if c.rank:
        needed |= {"proj.down.weight": (c.rank, c.hidden), "proj.up.weight": (c.hidden, c.rank)}
    return needed, {}


def _layers(c: ModelConfig, width: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of the tensors of all layers. `width` applies to the first layer (see `_layer`)."""
    needed, allowed = _layer(c, 0, width)
    for index in range(1, c.layers):
        must, may = _layer(c, index, c.hidden)
        needed |= must
        allowed |= may
    return needed, allowed


def _layer(c: ModelConfig, index: int, width: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of the tensors of a decoder layer. Its queries, keys and values are projected from `width`
    elements."""
    start, q, kv = f"layers.{index}.", c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts: Shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (c.hidden, q),
        "mlp.gate_proj": (c.ffn, c.hidden),
        "mlp.up_proj": (c.ffn, c.hidden),
        "mlp.down_proj": (c.hidden, c.ffn),
    }
    norms: Shapes = {"input_layernorm": (c.hidden,), "post_attention_layernorm": (c.hidden,)}
    if c.norms.heads:
        norms |= {f"self_attn.{x}_norm": (c.head_dim,) for x in "qk"}
    biases: Shapes = {f"{start}{name}.bias": (shape[0],) for name, shape in parts.items()}
    return {f"{start}{name}.weight": shape for name, shape in (parts | norms).items()}, biases


def check_tensors(where: Path, config: TrainableConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check a head's tensors against its config.

    Raises:
        CorruptModel: If a tensor is missing, unknown, not finite or has the wrong shape, or if the token maps or the
            config are inconsistent.
        UnsupportedModel: If the weights are quantised.
    """
    _check_config(where, config)
    needed, allowed = shapes_of(config)
    if missing := [name for name in needed if name not in tensors]:
        raise CorruptModel(f"the head {where} lacks {missing[0]}", _FETCH_AGAIN)
    if unknown := [name for name in tensors if name not in needed and name not in allowed]:
        raise CorruptModel(
            f"the head {where} holds {unknown[0]}, which its config does not account for",
            "Config and weights are from different heads. Fetch the head again",
        )
    for name, tensor in tensors.items():
        _check_tensor(where, name, tensor, (needed | allowed)[name])
    _check_maps(where, config, tensors)


def _check_config(where: Path, config: TrainableConfig) -> None:
    if isinstance(config, MedusaConfig):
        for path in config.paths:
            if not path or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in path):
                raise CorruptModel(
                    f"the tree of the head {where} has the path {list(path)}; paths must be lists of ranks >= 0",
                    "Correct its paths, or leave them out",
                )
    if isinstance(config, BlockConfig):
        _check_block(where, config)


def _check_block(where: Path, c: BlockConfig) -> None:
    wrong = {
        f"marks {len(c.causal)} of {c.layer.layers} layers causal or not": len(c.causal) not in (0, c.layer.layers),
        f"convolves {c.conv} entries of a block of {c.size}": c.conv > c.size,
        f"convolves groups of {c.conv_group} of {c.layer.hidden} channels": c.conv
        and (not c.conv_group or c.layer.hidden % c.conv_group),
        f"selects from {c.candidates} of {c.layer.vocab_size} tokens": c.selector
        and not 0 < c.candidates <= c.layer.vocab_size,
    }
    for cause, found in wrong.items():
        if found:
            raise CorruptModel(f"the head {where} {cause}", _FETCH_AGAIN)


def _check_tensor(where: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CorruptModel(
            f"{name} of the head {where} must have shape {shape} by its config, got {tuple(tensor.shape)}",
            "Config and weights are from different heads. Fetch the head again",
        )
    if name in MAPS:
        if tensor.dtype not in _INTEGERS:
            raise CorruptModel(f"{name} of the head {where} must hold integers, got {tensor.dtype}", _FETCH_AGAIN)
    elif tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModel(
            f"{name} of the head {where} is stored as {tensor.dtype}", "Use a head in bfloat16, float16 or float32"
        )
    elif not tensor.isfinite().all():
        raise CorruptModel(
            f"{name} of the head {where} holds NaN or infinity", "Its training diverged. Use another head"
        )


def _check_maps(where: Path, config: TrainableConfig, tensors: Mapping[str, Tensor]) -> None:
    if "d2t" in tensors and isinstance(config, (EagleConfig, BlockConfig)):
        targets = torch.arange(config.draft_vocab) + tensors["d2t"]
        _check_targets(f"d2t of the head {where}", targets, config.layer.vocab_size)
        if not targets.diff().gt(0).all():
            raise CorruptModel(f"d2t of the head {where} is not in ascending order", _FETCH_AGAIN)
        if not torch.equal(targets, tensors["t2d"].nonzero().flatten()):
            raise CorruptModel(f"d2t and t2d of the head {where} name different tokens", _FETCH_AGAIN)
    if "token_map" in tensors and isinstance(config, MedusaConfig):
        _check_targets(f"token_map of the head {where}", tensors["token_map"], config.vocab_size)


def _check_targets(name: str, targets: Tensor, vocab: int) -> None:
    if outside := targets[(targets < 0) | (targets >= vocab)].tolist():
        raise CorruptModel(f"{name} names token {outside[0]}, outside the vocabulary of {vocab} tokens", _FETCH_AGAIN)
    if len(targets.unique()) < len(targets):
        raise CorruptModel(f"{name} names a token twice", _FETCH_AGAIN)
