"""Storage types for the keys and values in the cache.

In 8 bits, a key or value of size D is stored as one float32 scale for each block of 32 elements, and D integers from
-127 to 127. A scale is the block's largest absolute value divided by 127. A single scale for the whole key would be too
coarse, because a few channels of Qwen's keys are ten times as large as the others. The rounding depends only on the key
or value itself, so a token leaves the same bits in any pass. The cache always moves whole keys and values, so its other
code need not know their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidOption

KVType = Literal["auto", "bf16", "f16", "f32", "int8"]
"""Requested type of keys and values. `auto` means the model's dtype."""

_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "int8": torch.int8,
}
_BLOCK, _SCALE = 32, 4
"""Number of elements that share a scale, and size of a scale in bytes."""


def check_kv_type(name: str) -> None:
    """Raise `InvalidOption` if `name` is not a type of keys and values."""
    if name not in get_args(KVType):
        raise InvalidOption(f"kv_type {name!r} is unknown", f"Choose from {', '.join(get_args(KVType))}")


def kv_dtype(name: KVType, model: torch.dtype) -> torch.dtype:
    """Return the dtype of stored keys and values, for a model whose dtype is `model`."""
    return _DTYPES.get(name, model)


def stored_size(size: int, dtype: torch.dtype) -> int:
    """Return the number of elements, of type `dtype`, that store a key or value of `size` elements."""
    return size + _SCALE * -(-size // _BLOCK) if dtype == torch.int8 else size


def size_of(stored: Tensor) -> int:
    """Return the size of the keys or values that `stored` represents, in elements."""
    return stored.shape[-1] - _scale_bytes(stored)


def _scale_bytes(stored: Tensor) -> int:
    return _SCALE * -(-stored.shape[-1] // (_BLOCK + _SCALE)) if stored.dtype == torch.int8 else 0


def to_stored(x: Tensor, like: Tensor) -> Tensor:
    """Convert keys or values to their stored form.

    Args:
        x: Keys or values [..., D], of any float dtype.
        like: A slab [..., stored size of D'], where D' >= D. Keys and values are padded with zeros to D'.
    """
    padded = F.pad(x, (0, size_of(like) - x.shape[-1]))
    return _quantised(padded) if like.dtype == torch.int8 else padded.to(like.dtype)


def _quantised(x: Tensor) -> Tensor:
    """Round keys or values [..., D] to 8 bits. A block that is not finite gets a scale that is not finite, and
    zeros."""
    size = x.shape[-1]
    blocks = F.pad(x.float(), (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scale[scale < torch.finfo(torch.float32).tiny] = 0
    codes = torch.where(scale.isfinite() & (scale > 0), blocks / scale, 0.0).round().to(torch.int8)
    return torch.cat([scale.flatten(-2).view(torch.int8), codes.flatten(-2)[..., :size]], -1)


def from_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert stored keys or values [..., stored size of D] to floats [..., D] of this dtype."""
    if x.dtype != torch.int8:
        return x.to(dtype)
    scales, codes = x.split([_scale_bytes(x), size_of(x)], -1)
    scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    floats: Tensor = codes.float() * scale.repeat_interleave(_BLOCK, -1)[..., : codes.shape[-1]]
    return floats.to(dtype)
