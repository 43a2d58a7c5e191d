"""Bytes of weights that a pass reads, for the loaded model and for the same model with `--quantize`."""

from __future__ import annotations

import math

from paceline.checkpoints.gguf_file import FLOATS, GGUFTensor, read_gguf
from paceline.checkpoints.loader import Loaded
from paceline.models.decoder import Decoder
from paceline.models.held import tensors_of
from paceline.protocols import Target

_SCALE = 2 / 32
"""Bytes per weight for the scale of its group, and also for the floor (docs/how-to/quantize.md)."""
_HEAD_BITS = 8
"""Minimum bits per weight of an output head."""


def weight_bytes(target: Target) -> int | None:
    """Return the bytes that a small pass reads: all weights except tables of embeddings, unless the head shares them.

    Returns:
        The bytes. None for a target that is not a native decoder, and for a mixture of experts, where a pass reads only
        some experts.
    """
    if not isinstance(target, Decoder) or any(layer.sparse for layer in target.config.plan):
        return None
    looked_up = {t.data_ptr() for t in tensors_of(target.tables, target)}
    read = (t for t in tensors_of(vars(target), target) if t.data_ptr() not in looked_up)
    return sum(t.numel() * t.element_size() for t in read)


def quantised_bytes(model: Loaded) -> dict[str, int]:
    """Return mode of `--quantize` -> `weight_bytes`. Empty if the model is already quantised or cannot be quantised."""
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
    """Return the bytes of a matrix. Supported codes are kept, floats get `bits` bits, and other codes 8 bits."""
    if tensor.kept_bits():
        return tensor.data.numel()
    return _coded(math.prod(tensor.shape), bits if tensor.kind in FLOATS else 8)


def _coded(count: int, bits: int) -> float:
    """Return the bytes of quantised weights: groups of 32 with a scale and, with 4 bits, a floor."""
    return count * (bits / 8 + _SCALE * (1 + (bits == 4)))
