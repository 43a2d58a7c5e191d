"""Bytes of weights that a pass reads: of the loaded model, and of the same model under `--quantize`."""

from __future__ import annotations

import math

from paceline.checkpoints.gguf_file import FLOATS, GGUFTensor, read_gguf
from paceline.checkpoints.loader import Loaded
from paceline.models.decoder import Decoder
from paceline.models.held import tensors_of
from paceline.protocols import Target

_SCALE = 2 / 32
"""Bytes of a scale, or of a floor, per weight of a group (docs/how-to/quantize.md)."""
_HEAD_BITS = 8
"""Bits per weight of an output head, at least."""


def weight_bytes(target: Target) -> int | None:
    """Return the bytes that a small pass reads: all weights, but of the embedding table only what the head shares.

    None for targets other than the native decoder, and for experts, of which a pass reads only some.
    """
    if not isinstance(target, Decoder) or any(layer.sparse for layer in target.config.plan):
        return None
    parts = {name: part for name, part in vars(target).items() if name != "_embed"}
    return sum(t.numel() * t.element_size() for t in tensors_of(parts, target))


def quantised_bytes(model: Loaded) -> dict[str, int]:
    """Return `weight_bytes` by mode; empty for a model that is already quantised or cannot be."""
    target = model.target
    now = weight_bytes(target)
    if model.quantize or now is None or not isinstance(target, Decoder):
        return {}
    itemsize, head = target.dtype.itemsize, target.config.vocab_size * target.config.hidden
    modes = {"int8": 8, "int4": 4}
    if not model.path.is_file():
        rest = now // itemsize - head
        return {name: round(_coded(head, _HEAD_BITS) + _coded(rest, bits)) for name, bits in modes.items()}
    tensors = read_gguf(model.path).tensors
    output = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    matrices = {
        name: tensor
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and (name == output or name != "token_embd.weight")
    }
    others = max(0, now - itemsize * sum(math.prod(t.shape) for t in matrices.values()))
    return {
        name: others + round(sum(_held(t, _HEAD_BITS if part == output else bits) for part, t in matrices.items()))
        for name, bits in modes.items()
    }


def _held(tensor: GGUFTensor, bits: int) -> float:
    """Bytes of a matrix: its own codes are kept; floats get so many bits, and codes of no use here 8."""
    if tensor.kept_bits():
        return tensor.data.numel()
    return _coded(math.prod(tensor.shape), bits if tensor.kind in FLOATS else 8)


def _coded(count: int, bits: int) -> float:
    """Bytes of weights in groups of 32 with a scale, and in 4 bits a floor."""
    return count * (bits / 8 + _SCALE * (1 + (bits == 4)))
