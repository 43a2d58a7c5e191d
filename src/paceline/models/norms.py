"""Norms of the stream, and of query and key heads (QK-norm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import FLOAT_KINDS, NativeNorm
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight`: Weight in the dtype of x or a wider dtype. With a wider dtype, the result is rounded only once
        (Gemma)."""
        self.weight, self.eps = weight, eps
        self._doubled = F.pad(weight, (0, len(weight)))
        self._native: NativeNorm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype in FLOAT_KINDS and x.device.type == "cpu" and library() is not None:
            self._native = self._native or NativeNorm(self.weight, self.eps)
            return self._native(x)
        if x.device.type != "cpu":
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        # On a CPU, rms_norm takes eight kernels, but layer_norm takes only one. [x, -x] has mean 0 and variance
        # mean(x^2).
        doubled = torch.cat([x, -x], -1)
        return F.layer_norm(doubled, self._doubled.shape, self._doubled, None, self.eps)[..., : x.shape[-1]]


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension (Ba, Kiros and Hinton 2016)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


class HeadNorm:
    """A separate RMS norm of each query head and key head (Qwen3, Gemma 3). Each head is normed, and then multiplied by
    its weight."""

    def __init__(self, q: Tensor, k: Tensor, heads: int, kv_heads: int, eps: float) -> None:
        """`q` [D] is the weight for all query heads, and `k` [D] is the weight for all key heads."""
        self.weight = q.new_empty(heads + kv_heads, len(q))
        self.weight[:heads], self.weight[heads:] = q, k
        self._norm = RMSNorm(torch.ones_like(q), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [B, T, n, D], which contains queries and keys, or only keys."""
        return (self._norm(x) * self.weight[-x.shape[2] :]).to(x.dtype)


class WideNorm:
    """QK-norm across heads: one RMS norm over all query heads, and one over all key heads (OLMo 2)."""

    def __init__(self, q: Tensor, k: Tensor, kv_heads: int, eps: float) -> None:
        """`q` [heads * D] and `k` [kv_heads * D] are the weights."""
        self._q, self._k, self._kv_heads = RMSNorm(q, eps), RMSNorm(k, eps), kv_heads

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [B, T, n, D], which contains queries and keys, or only keys."""
        q, k = x[:, :, : -self._kv_heads], x[:, :, -self._kv_heads :]
        keys = self._k(k.flatten(2)).view_as(k)
        return torch.cat([self._q(q.flatten(2)).view_as(q), keys], 2) if q.shape[2] else keys


class HeadLayerNorm:
    """A separate layer norm of each query head and key head (Command R+, StableLM, Phi)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """`weight` and `bias` [heads + kv_heads, D] have one row per head, in float32 or wider."""
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x [B, T, n, D], which contains queries and keys, or only keys."""
        n, size = x.shape[2:]
        y = F.layer_norm(x.to(self._weight.dtype), (size,), eps=self._eps) * self._weight[-n:]
        return (y if self._bias is None else y + self._bias[-n:]).to(x.dtype)


HeadNorms = HeadNorm | WideNorm | HeadLayerNorm


def make_norm(c: ModelConfig, weights: Weights, name: str, size: int) -> Norm:
    """Build a norm over `size` elements from `name`.weight, and from `name`.bias if it is a layer norm with a bias."""
    if c.norms.kind == "rms":
        return RMSNorm(norm_weight(c, weights, name, size), c.norms.eps)
    bias = weights.get(name + ".bias", (size,)) if name + ".bias" in weights else None
    return LayerNorm(weights.get(name + ".weight", (size,)), bias, c.norms.eps)


def norm_weight(c: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """Return the weight [size] of a norm, plus the family's offset."""
    if not c.norms.offset:
        return weights.get(name + ".weight", (size,))
    # If a weight is stored minus 1, adding the offset in bfloat16 would round most of the weight away.
    return weights.get(name + ".weight", (size,), weights.precise_dtype) + c.norms.offset


def make_head_norms(
    c: ModelConfig,
    weights: Weights,
    prefix: str,
    order: Tensor | None = None,
    names: tuple[str, str] = ("q_norm", "k_norm"),
) -> HeadNorms | None:
    """Build the norms of query and key heads. Return None if there are none. `order`: The order of the elements of each
    head."""
    if not c.norms.heads:
        return None
    if c.norms.kind == "layer":
        return _head_layer_norm(c, weights, prefix, order)
    if c.norms.heads != "joint":
        q, k = (norm_weight(c, weights, prefix + name, c.head_dim) for name in names)
        return HeadNorm(q, k, c.heads, c.kv_heads, c.norms.eps)
    sizes = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q, k = (norm_weight(c, weights, prefix + name, size) for name, size in zip(names, sizes, strict=True))
    return WideNorm(q, k, c.kv_heads, c.norms.eps)


def _head_layer_norm(c: ModelConfig, weights: Weights, prefix: str, order: Tensor | None) -> HeadLayerNorm:
    def table(kind: str) -> Tensor:
        rows = torch.empty(c.heads + c.kv_heads, c.head_dim, dtype=weights.precise_dtype, device=weights.device)
        for name, part in ((f"{prefix}q_norm", rows[: c.heads]), (f"{prefix}k_norm", rows[c.heads :])):
            if f"{name}.0.{kind}" in weights:  # StableLM has one tensor per head
                for i, row in enumerate(part):
                    row.copy_(weights.get(f"{name}.{i}.{kind}", (c.head_dim,), weights.precise_dtype))
            else:
                shape = (len(part), c.head_dim) if c.norms.heads == "own" else (c.head_dim,)
                part.copy_(weights.get(f"{name}.{kind}", shape, weights.precise_dtype))
        return rows if order is None else rows[:, order]

    bias = table("bias") if f"{prefix}q_norm.bias" in weights else None
    return HeadLayerNorm(table("weight"), bias, c.norms.eps)
